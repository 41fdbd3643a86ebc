//! One batch after the other: conditions, changes, limits.

use bytes::Bytes;

use super::{Harness, all, collect, put};
use crate::batch::Batch;
use crate::error::Error;
use crate::store::MetaStore;
use crate::types::{KEY_BYTES_MAX, KeyRange, Revision, VALUE_BYTES_MAX};

/// A value has the number of the commit that wrote it, and numbers grow.
pub async fn revisions<H: Harness>(harness: &H) {
    let store = harness.store().await;
    let first = put(&store, b"a", b"1").await;
    let second = put(&store, b"b", b"2").await;
    assert!(first < second);
    assert_eq!(store.get(b"a").await.unwrap().unwrap().revision, first);
    let third = put(&store, b"a", b"3").await;
    let found = store.get(b"a").await.unwrap().unwrap();
    assert_eq!((found.revision, &found.value[..]), (third, &b"3"[..]));
    assert_eq!(store.get(b"b").await.unwrap().unwrap().revision, second);
    if let Some(same) = store.try_get(b"a") {
        assert_eq!(same, Ok(Some(found)));
    }
    let page = store.scan(&KeyRange::all(), 0).await.unwrap();
    assert!(page.revision >= third);
    let revisions: Vec<_> = page
        .entries
        .iter()
        .map(|entry| entry.versioned.revision)
        .collect();
    assert_eq!(revisions, [third, second]);
    store
        .commit(Batch::new().delete("a").delete("never").clone())
        .await
        .unwrap();
    assert_eq!(store.get(b"a").await, Ok(None));
}

/// Each kind holds when it should; a failed one changes nothing and is named.
pub async fn preconditions<H: Harness>(harness: &H) {
    let store = harness.store().await;
    let revision = put(&store, b"a", b"1").await;
    put(&store, b"empty", b"").await;
    let before = all(&store).await;
    let other = Revision(revision.0 + 1000);
    let batch = |build: &dyn Fn(&mut Batch)| {
        let mut batch = Batch::new();
        build(&mut batch);
        batch
            .put("changed", "x")
            .delete("a")
            .delete_range(KeyRange::all());
        batch
    };
    type Build<'a> = &'a dyn Fn(&mut Batch);
    let failing: [(&str, Build<'_>, usize); 10] = [
        ("absent", &|b| _ = b.require_absent("a"), 0),
        ("absent but empty", &|b| _ = b.require_absent("empty"), 0),
        ("revision", &|b| _ = b.require_revision("a", other), 0),
        (
            "revision of nothing",
            &|b| _ = b.require_revision("none", revision),
            0,
        ),
        ("value", &|b| _ = b.require_value("a", "2"), 0),
        ("longer value", &|b| _ = b.require_value("a", "11"), 0),
        ("value of nothing", &|b| _ = b.require_value("none", ""), 0),
        (
            "second",
            &|b| _ = b.require_value("a", "1").require_absent("a"),
            1,
        ),
        (
            "first of two",
            &|b| _ = b.require_absent("a").require_value("a", "2"),
            0,
        ),
        (
            "fourth",
            &|b| {
                b.require_absent("none").require_revision("a", revision);
                b.require_value("empty", "")
                    .require_revision("empty", revision);
            },
            3,
        ),
    ];
    for (name, build, index) in failing {
        let outcome = store.commit(batch(build)).await;
        assert_eq!(outcome, Err(Error::PreconditionFailed { index }), "{name}");
        assert_eq!(all(&store).await, before, "{name}");
    }
    let mut holding = Batch::new();
    holding
        .require_absent("none")
        .require_revision("a", revision);
    holding
        .require_value("a", "1")
        .require_value("empty", "")
        .put("a", "2");
    let next = store.commit(holding).await.unwrap();
    let mut stale = Batch::new();
    stale.require_revision("a", revision).put("a", "3");
    assert_eq!(
        store.commit(stale).await,
        Err(Error::PreconditionFailed { index: 0 })
    );
    // A batch that only checks is a commit like any other.
    store
        .commit(Batch::new().require_revision("a", next).clone())
        .await
        .unwrap();
    let checked = store.commit(Batch::new().require_absent("a").clone()).await;
    assert_eq!(checked, Err(Error::PreconditionFailed { index: 0 }));
    store.commit(Batch::new()).await.unwrap();
}

/// Range deletes come before the puts of their batch, wherever both lie.
pub async fn range_deletes<H: Harness>(harness: &H) {
    let store = harness.store().await;
    let fill = ["a", "b", "b/1", "b/2", "b/3", "c", "d"];
    let mut batch = Batch::new();
    for key in fill {
        batch.put(key, "old");
    }
    store.commit(batch).await.unwrap();
    let mut batch = Batch::new();
    batch.put("b/2", "new").put("b/4", "new").delete("d");
    batch
        .delete_range(KeyRange::prefix("b/"))
        .delete_range(KeyRange::new("x", "y"));
    let revision = store.commit(batch).await.unwrap();
    let found = all(&store).await;
    let keys: Vec<_> = found.iter().map(|entry| &entry.key[..]).collect();
    assert_eq!(keys, [&b"a"[..], b"b", b"b/2", b"b/4", b"c"]);
    assert_eq!(found[2].versioned.revision, revision);
    assert_eq!(&found[2].versioned.value[..], b"new");
    let mut batch = Batch::new();
    batch
        .delete_range(KeyRange::new("b/3", "z"))
        .delete_range(KeyRange::new("b", "b/3"));
    batch.put("c", "again").delete("b/2").put("bb", "");
    store.commit(batch).await.unwrap();
    let keys: Vec<_> = all(&store)
        .await
        .into_iter()
        .map(|entry| entry.key)
        .collect();
    assert_eq!(keys, ["a", "bb", "c"]);
    store
        .commit(Batch::new().delete_range(KeyRange::all()).clone())
        .await
        .unwrap();
    assert_eq!(all(&store).await, []);
}

/// The limits are the same everywhere, and say what is too large.
pub async fn limits<H: Harness>(harness: &H) {
    let store = harness.store().await;
    let mut batch = Batch::new();
    batch.put(vec![b'k'; KEY_BYTES_MAX], vec![b'v'; VALUE_BYTES_MAX]);
    store.commit(batch).await.unwrap();
    let found = store.get(&[b'k'; KEY_BYTES_MAX]).await.unwrap().unwrap();
    assert!(found.value == vec![b'v'; VALUE_BYTES_MAX]);
    let refused = [
        Batch::new().put(vec![b'k'; KEY_BYTES_MAX + 1], "").clone(),
        Batch::new().put("a", vec![0; VALUE_BYTES_MAX + 1]).clone(),
        Batch::new()
            .require_value("a", vec![0; VALUE_BYTES_MAX + 1])
            .clone(),
    ];
    for batch in refused {
        let outcome = store.commit(batch).await;
        assert!(
            matches!(outcome, Err(Error::TooLarge { .. })),
            "{outcome:?}"
        );
    }
    let mut batch = Batch::new();
    for number in 0..9u8 {
        batch.put(vec![number + 1], vec![0; VALUE_BYTES_MAX]);
    }
    let outcome = store.commit(batch).await;
    assert!(
        matches!(outcome, Err(Error::TooLarge { what: "batch", .. })),
        "{outcome:?}"
    );
    let outcome = store.commit(Batch::new().put("", "").clone()).await;
    assert!(matches!(outcome, Err(Error::Invalid { .. })), "{outcome:?}");
    assert_eq!(all(&store).await.len(), 1);
}

/// Many operations or many bytes are still one batch.
pub async fn large_batches<H: Harness>(harness: &H) {
    let store = harness.store().await;
    let key = |number: u32| format!("k/{number:05}");
    let mut many = Batch::new();
    many.require_absent("gate").put("gate", "1");
    for number in 0..1000 {
        many.put(key(number), number.to_le_bytes().to_vec());
    }
    let revision = store.commit(many.clone()).await.unwrap();
    assert_eq!(
        store.commit(many).await,
        Err(Error::PreconditionFailed { index: 0 })
    );
    let found = collect(&store, &KeyRange::prefix("k/")).await;
    assert_eq!(found.len(), 1000);
    assert!(
        found
            .iter()
            .all(|entry| entry.versioned.revision == revision)
    );
    // What a large batch wrote can be named by its number.
    let mut next = Batch::new();
    next.require_revision(key(0), revision)
        .require_revision(key(999), revision);
    next.put(key(0), "again");
    store.commit(next).await.unwrap();

    let mut replace = Batch::new();
    replace
        .require_value("gate", "1")
        .put("gate", "2")
        .delete_range(KeyRange::prefix("k/"));
    for number in 500..800 {
        replace.put(key(number), "new");
    }
    for number in 0..300 {
        replace.delete(format!("gone/{number}"));
    }
    let revision = store.commit(replace).await.unwrap();
    let found = collect(&store, &KeyRange::prefix("k/")).await;
    assert_eq!(found.len(), 300);
    assert!(
        found.iter().all(|entry| {
            entry.versioned.revision == revision && entry.versioned.value == "new"
        })
    );

    let mut heavy = Batch::new();
    for number in 0..7u8 {
        heavy.put(format!("h/{number}"), vec![number; VALUE_BYTES_MAX]);
    }
    store.commit(heavy).await.unwrap();
    let found = collect(&store, &KeyRange::prefix("h/")).await;
    let sizes: Vec<_> = found
        .iter()
        .map(|entry| entry.versioned.value.len())
        .collect();
    assert_eq!(sizes, [VALUE_BYTES_MAX; 7]);

    let mut checks = Batch::new();
    for number in 500..800 {
        checks.require_value(key(number), "new");
    }
    checks
        .require_absent("never")
        .require_absent(key(501))
        .put("x", Bytes::new());
    assert_eq!(
        store.commit(checks).await,
        Err(Error::PreconditionFailed { index: 301 })
    );
    assert_eq!(store.get(b"x").await, Ok(None));
}
