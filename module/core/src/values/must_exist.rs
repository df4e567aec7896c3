//! Values that exist unless there is a bug.

/// For an [`Option`] that is never none unless this crate has a bug. Tests stop at such a bug. A
/// server does nothing instead: a panic would end it, and all other locks with it.
pub(crate) trait MustExist {
    fn must_exist(self) -> Self;
}

impl<T> MustExist for Option<T> {
    #[inline]
    #[track_caller]
    fn must_exist(self) -> Self {
        debug_assert!(self.is_some(), "it must exist");
        self
    }
}
