//! The crate has one source of chance: what makes a UUID unlike any other.

use uuid::Uuid;

/// A number by chance.
pub(crate) fn random() -> u32 {
    uuid().as_fields().0
}

/// A name that nobody else has; in a test, on a thread with a seed, one that follows from it.
pub(crate) fn uuid() -> Uuid {
    #[cfg(feature = "test-util")]
    if IS_SEEDED.get() {
        let bytes = fastrand::u128(..).to_le_bytes();
        return uuid::Builder::from_random_bytes(bytes).into_uuid();
    }
    Uuid::new_v4()
}

#[cfg(feature = "test-util")]
thread_local! {
    static IS_SEEDED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// From now on all that is left to chance in clients on this thread follows from the seed: ids,
/// and how long pauses are.
#[cfg(feature = "test-util")]
pub fn seed(seed: u64) {
    fastrand::seed(seed);
    IS_SEEDED.set(true);
}
