//! Dumping and loading.

use std::io::Cursor;
use std::sync::Arc;

use super::{Harness, all, put};
use crate::batch::Batch;
use crate::dump::{LOADING_KEY, dump, load};
use crate::error::Error;
use crate::store::MetaStore;
use crate::types::KeyRange;

/// A dump taken while the store changes shows one moment, and loads into an empty store.
pub async fn dump_and_load<H: Harness>(harness: &H) {
    let store = Arc::new(harness.store().await);
    for number in 0..40u32 {
        let mut batch = Batch::new();
        for entry in 0..100u32 {
            batch.put(format!("k/{number:03}/{entry:03}"), vec![7; 200]);
        }
        batch.put("a", "0").put("z", "0");
        store.commit(batch).await.unwrap();
    }
    let writer = {
        let store = Arc::clone(&store);
        tokio::spawn(async move {
            for number in 1..100u32 {
                let mut batch = Batch::new();
                batch
                    .put("a", number.to_string())
                    .put("z", number.to_string());
                batch.put(format!("k/{:03}/new", number % 40), "new");
                store.commit(batch).await.unwrap();
            }
        })
    };
    let mut file = Vec::new();
    let summary = dump(&*store, &mut file).await.unwrap();
    writer.await.unwrap();

    let target = harness.store().await;
    assert_eq!(load(&target, &mut Cursor::new(&file)).await, Ok(summary));
    let found = all(&target).await;
    assert_eq!(found.len() as u64, summary.entries);
    let of = |key: &[u8]| found.iter().find(|entry| entry.key == key).unwrap();
    assert_eq!(of(b"a").versioned.value, of(b"z").versioned.value);
    assert!(found.len() >= 4002 && target.get(LOADING_KEY).await == Ok(None));
    assert_eq!(
        load(&target, &mut Cursor::new(&file)).await,
        Err(Error::NotEmpty)
    );

    let mut again = Vec::new();
    let second = dump(&target, &mut again).await.unwrap();
    assert_eq!(
        (second.entries, second.bytes),
        (summary.entries, summary.bytes)
    );
}

/// A file that is cut or changed anywhere is refused before anything is loaded, and a load that
/// was interrupted is begun anew.
pub async fn damaged_dumps<H: Harness>(harness: &H) {
    let store = harness.store().await;
    for number in 0..30u8 {
        put(&store, &[b'a', number], &[number; 100]).await;
    }
    let mut file = Vec::new();
    dump(&store, &mut file).await.unwrap();
    let target = harness.store().await;
    let refused = async |file: &[u8]| {
        let outcome = load(&target, &mut Cursor::new(file)).await;
        assert!(
            matches!(outcome, Err(Error::DumpDamaged { .. })),
            "{outcome:?}"
        );
    };
    for cut in (0..file.len()).step_by(13) {
        refused(&file[..cut]).await;
    }
    for at in (0..file.len()).step_by(7) {
        let mut damaged = file.clone();
        damaged[at] ^= 0x40;
        refused(&damaged).await;
    }
    refused(&[&file[..], b"x"].concat()).await;
    assert_eq!(all(&target).await, []);

    let mut interrupted = Batch::new();
    interrupted.put(LOADING_KEY, "").put("half", "loaded");
    target.commit(interrupted).await.unwrap();
    let refused = dump(&target, &mut Vec::new()).await;
    assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");
    load(&target, &mut Cursor::new(&file)).await.unwrap();
    assert_eq!(all(&target).await.len(), 30);
    assert_eq!(
        target
            .scan(&KeyRange::prefix("half"), 0)
            .await
            .unwrap()
            .entries,
        []
    );
}
