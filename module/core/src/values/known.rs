//! Values that are read only if the decision needs them.

/// A value of the keyspace, or that it was not read.
///
/// Each look-up costs the server's time, so the driver leaves out what [`crate::Task`] says is not
/// needed. To ask for it all the same is a bug of the decision: without this type "not read" would
/// look like "has no end". The tests read no more than the driver, so they see such a bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known<T>(Option<T>);

impl<T: Copy> Known<T> {
    /// It was not read.
    pub const NOT_READ: Self = Self(None);

    /// It was read, and is this.
    pub const fn read(value: T) -> Self {
        Self(Some(value))
    }

    /// Reads it if it is needed.
    pub fn read_if(is_needed: bool, read: impl FnOnce() -> T) -> Self {
        Self(is_needed.then(read))
    }

    /// The value. If it was not read, the tests stop, and a server goes on with `otherwise`.
    pub fn get_or(self, otherwise: T) -> T {
        debug_assert!(self.0.is_some(), "a decision asks for what was not read");
        self.0.unwrap_or(otherwise)
    }
}
