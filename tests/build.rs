//! Tells the tests for which target they were compiled: their own programs in C are for it too.

use std::env;

fn main() {
    let target = env::var("TARGET").unwrap_or_default();
    println!("cargo::rustc-env=TARGET={target}");
    println!("cargo::rerun-if-changed=build.rs");
}
