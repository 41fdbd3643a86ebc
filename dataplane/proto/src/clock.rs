//! The one place that reads the wall clock.

/// Wall-clock time, nanoseconds since 1970; may go backwards.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct WallNanos(pub i64);

impl WallNanos {
    /// Reads the machine's clock. Only for stamps shown to people and stored as file times;
    /// leases and deadlines use the runtime's monotonic clock.
    #[must_use]
    #[allow(
        clippy::disallowed_methods,
        reason = "this is the place the ban points to"
    )]
    pub fn now() -> Self {
        let since = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        Self(i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
    }
}
