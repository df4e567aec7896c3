//! How the types without async come from those of the same names: a list of methods is enough.

use std::sync::Arc;

use super::Runtime;

/// A type whose blocking twin a call here returns in its place.
pub(super) trait HasTwin {
    type Twin;

    fn twin(self, runtime: &Arc<Runtime>) -> Self::Twin;
}

/// A type of the crate together with the runtime in which its calls are waited for, and those of
/// its methods that can be [forwarded](forward).
macro_rules! twin {
    ($(#[$meta:meta])* $name:ident $(<$mode:ident = $default:ident>)? { $($methods:tt)* }) => {
        $(#[$meta])*
        pub struct $name $(<$mode = $default>)? {
            // Before the thread, so that its tasks have ended when the runtime does.
            inner: crate::$name $(<$mode>)?,
            runtime: std::sync::Arc<$crate::blocking::Runtime>,
        }

        impl $(<$mode>)? $crate::blocking::twin::HasTwin for crate::$name $(<$mode>)? {
            type Twin = $name $(<$mode>)?;

            fn twin(self, runtime: &std::sync::Arc<$crate::blocking::Runtime>) -> Self::Twin {
                $name { inner: self, runtime: std::sync::Arc::clone(runtime) }
            }
        }

        impl $(<$mode>)? std::fmt::Debug for $name $(<$mode>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.inner.fmt(f)
            }
        }

        impl $(<$mode>)? $name $(<$mode>)? {
            forward! { crate::$name: $($methods)* }
        }
    };
}

/// Methods that do what those of the same names do in the type that is named first; those of an
/// `async fn` are waited for in the runtime. A lock or a guard that comes back `as twin` becomes
/// its twin. Before them may be the settings of a lock, which need no runtime.
macro_rules! forward {
    ($of:path:) => {};
    ($of:path: setters! { $($settings:tt)* } $($rest:tt)*) => {
        setters! { $($settings)* }

        forward! { $of: $($rest)* }
    };
    ($of:path:
        $(#[$doc:meta])*
        async fn $name:ident($(&$by_ref:ident)? $($by_value:ident)? $(, $arg:ident: $type:ty)*)
            -> $out:ty $(as $twin:ident)?;
        $($rest:tt)*
    ) => {
        $(#[$doc])*
        ///
        /// # Errors
        ///
        #[doc = concat!("As [`", stringify!($of), "::", stringify!($name), "`], which says more.")]
        ///
        /// # Panics
        ///
        /// Inside an async task.
        pub fn $name($(&$by_ref)? $($by_value)? $(, $arg: $type)*) -> $out {
            let this = $($by_ref)? $($by_value)?;
            this.runtime.handle.block_on(this.inner.$name($($arg),*))
                $(.map(|value| value.$twin(&this.runtime)))?
        }

        forward! { $of: $($rest)* }
    };
    ($of:path:
        $(#[$doc:meta])*
        fn $name:ident(&$this:ident $(, $arg:ident: $type:ty)*) -> $out:ty $(as $twin:ident)?;
        $($rest:tt)*
    ) => {
        $(#[$doc])*
        ///
        #[doc = concat!("See [`", stringify!($of), "::", stringify!($name), "`].")]
        pub fn $name(&$this $(, $arg: $type)*) -> $out {
            $this.inner.$name($($arg),*)$(.$twin(&$this.runtime))?
        }

        forward! { $of: $($rest)* }
    };
}

pub(super) use {forward, twin};
