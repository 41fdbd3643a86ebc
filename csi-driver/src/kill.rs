//! Named places at which a test ends the process, as a crash or an eviction would.
//!
//! Built in only with the feature `kill-points`; then the process ends at the place that
//! `HITHER_CSI_KILL` names. A test takes every place in [`PLACES`], kills there, repeats the
//! request and looks at what is left.

/// All places, in the order a volume's life passes them.
pub const PLACES: &[&str] = &[
    "create.begun",
    "create.holder",
    "create.record",
    "create.quota",
    "create.data",
    "create.moved",
    "expand.set",
    "modify.set",
    "stage.recorded",
    "stage.mounted",
    "stage.served",
    "stage.confirmed",
    "publish.recorded",
    "publish.directory",
    "publish.bound",
    "publish.options",
    "unpublish.detached",
    "unpublish.removed",
    "unpublish.recorded",
    "unstage.detached",
    "unstage.ended",
    "unstage.forgotten",
    "delete.moved",
    "delete.purged",
];

/// Ends the process here if that is wanted.
#[inline]
pub fn point(place: &str) {
    #[cfg(feature = "kill-points")]
    {
        debug_assert!(PLACES.contains(&place), "{place} is not listed");
        if std::env::var("HITHER_CSI_KILL").is_ok_and(|wanted| wanted == place) {
            eprintln!("killed at {place}");
            std::process::abort();
        }
    }
    #[cfg(not(feature = "kill-points"))]
    let _ = place;
}
