//! The program against real servers, as a shell starts it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::print_stderr,
    clippy::too_many_lines,
    reason = "a test that meets the unexpected should fail, and what it counts is small"
)]

mod admin; // what operators type
mod exporter; // metrics, with a real Prometheus
mod failover; // docs/operations.md: which jobs go on
mod jobs; // terminals, job control, process 1
mod overlap; // two commands never run at once
mod pages; // completions, man pages
mod places; // clusters, sentinels, TLS, users
mod program; // starts it
mod run; // statuses, options, signals
mod top; // a live screen, in tmux
mod transcripts; // docs/cli.md, played
