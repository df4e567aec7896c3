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
///
/// For a method that a guard of several locks lacks, the compiler names the replacement:
///
/// ```compile_fail,E0277
/// fn name(guard: &rlock_client::MultiGuard) -> &[u8] {
///     guard.name()
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "a guard of several locks at once has no one name, and guards no command",
    label = "this guard holds several locks",
    note = "`guard.names()` and `guard.token_of(name)` say it of each of them"
)]
pub trait Single: sealed::Sealed {}

/// Holds a trait that other crates can neither name nor implement.
mod sealed {
    #[expect(unnameable_types, reason = "that is what it is for")]
    pub trait Sealed {}
}

macro_rules! single {
    ($($mode:ty),*) => {
        $(
            impl sealed::Sealed for $mode {}
            impl Single for $mode {}
        )*
    };
}

single!(Plain, Read, Write, Permits);
