//! How a lock is held: what the guards of plain locks, readers, writers, permits and several locks
//! are told apart by. See [`Guard`](crate::Guard).

/// A plain lock, held alone.
#[derive(Debug)]
pub enum Plain {}

/// A read-write lock, held together with other readers.
#[derive(Debug)]
pub enum Read {}

/// A read-write lock, held alone.
#[derive(Debug)]
pub enum Write {}

/// Several plain locks, held together as one.
#[derive(Debug)]
pub enum Multi {}

/// Some of the permits of a semaphore.
#[derive(Debug)]
pub enum Permits {}

/// The modes in which one lock is held, which has a name. There are no others:
///
/// ```compile_fail
/// enum Another {}
/// impl rlock_client::mode::Single for Another {}
/// ```
pub trait Single: sealed::Sealed {}

/// What other crates can neither name nor implement.
mod sealed {
    #[expect(unnameable_types, reason = "that is what it is for")]
    pub trait Sealed {}

    impl Sealed for super::Plain {}
    impl Sealed for super::Read {}
    impl Sealed for super::Write {}
    impl Sealed for super::Permits {}
}

impl<M: sealed::Sealed> Single for M {}
