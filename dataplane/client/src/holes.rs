//! Holes: a range that reads as zeros.

use std::sync::Arc;

use hither_proto::ids::CHUNK_SIZE;
use hither_proto::meta::{PunchHole, request::Op};

use crate::client::Inner;
use crate::error::FsError;
use crate::file::OpenFile;
use crate::session::How;

impl Inner {
    /// Writes zeros at the edges, and takes the chunks of whole pieces away.
    pub(crate) async fn punch_hole(
        self: &Arc<Self>,
        open: &OpenFile,
        offset: u64,
        length: u64,
    ) -> Result<(), FsError> {
        let file = &open.file;
        let size = {
            let _held = self.hold(file, true, self.deadline()).await?;
            file.data.lock().size
        };
        let end = offset.saturating_add(length).min(size);
        if offset >= end {
            return Ok(());
        }
        let first_whole = offset.div_ceil(CHUNK_SIZE) * CHUNK_SIZE;
        let last_whole = end / CHUNK_SIZE * CHUNK_SIZE;
        // The edges are written as zeros; whole pieces between them lose their chunks.
        let (head_end, tail_start) = if first_whole < last_whole {
            (first_whole, last_whole)
        } else {
            (end, end)
        };
        let edges = [offset..head_end, tail_start..end];
        let plain = OpenFile::new(Arc::clone(file), false, false);
        for edge in edges {
            let mut at = edge.start;
            while at < edge.end {
                let step = (edge.end - at).min(ZERO_BYTES);
                let zeros = vec![0; usize::try_from(step).unwrap_or(0)];
                self.write(&plain, at, zeros.into()).await?;
                at += step;
            }
        }
        if first_whole >= last_whole {
            return Ok(());
        }
        let _alone = file.gate.write().await;
        let lease = self.settle_before_change(file).await?;
        let sent = self.cache.sent_at();
        let op = PunchHole {
            ino: file.ino.0,
            hint: self.cache.hint(file.ino),
            lease,
            offset: first_whole,
            length: last_whole - first_whole,
        };
        let how = How {
            changes: true,
            ..How::default()
        };
        let reply = self.ask(file.ino, Op::PunchHole(op), how).await?;
        {
            let mut data = file.data.lock();
            let inside = |index: &u32| {
                let start = u64::from(*index) * CHUNK_SIZE;
                first_whole <= start && start < last_whole
            };
            self.cut_out_mapped(&mut data, first_whole..last_whole);
            data.refs.retain(|index, _| !inside(index));
            data.unreported.retain(|index| !inside(index));
            data.generation += 1;
        }
        self.take_changed(sent, &reply).map(|_| ())
    }
}

/// Zeros written at a time.
const ZERO_BYTES: u64 = 1 << 20;
