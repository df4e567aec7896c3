//! `make bench`; `--quick` shows that it works, `--plots` only draws anew, and names of parts run
//! those alone. Quick runs leave `docs/bench` as it is.
#![allow(missing_docs, reason = "a program")]

use std::path::Path;

fn main() {
    // cargo adds `--bench`.
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| word != "--bench")
        .collect();
    let has = |option: &str| words.iter().any(|word| word == option);
    let folder = if has("--quick") {
        Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench")
    } else {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/bench")
    };
    rlock_bench::run(&rlock_bench::Words {
        quick: has("--quick"),
        plots_only: has("--plots"),
        parts: words
            .iter()
            .filter(|word| !word.starts_with("--"))
            .cloned()
            .collect(),
        folder,
    });
}
