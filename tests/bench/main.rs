//! The benchmark: `make bench`. Everything is a ratio within one run, because the machines that it
//! runs on are small, shared and noisy: contenders take turns in short rounds, and what is compared
//! are rounds that were neighbours.
#![allow(missing_docs, reason = "a program")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::cast_precision_loss,
    clippy::print_stdout,
    reason = "a program that prints, and stops when something is not as it should be"
)]

mod contended;
mod hand_over;
mod numbers;
mod scripts;
mod uncontended;
mod wire;

use rlock_tests::Server;

fn main() {
    let quick = std::env::args().any(|word| word == "--quick");
    let server = Server::start();
    println!(
        "{}, {} pass, load before it {}\n",
        server_name(&server),
        if quick { "quick" } else { "full" },
        load_average()
    );
    uncontended::measure(&server, quick);
    hand_over::measure(&server, quick);
    contended::measure(&server, quick);
}

fn server_name(server: &Server) -> String {
    let redis = server.info("redis_version").unwrap_or_default();
    match server.info("valkey_version") {
        Some(valkey) => format!("Valkey {valkey}"),
        None => format!("Redis {redis}"),
    }
}

/// How many processes wanted a core in the last minute: much above zero, and others are in the way.
fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let minute = text.split(' ').next().filter(|minute| !minute.is_empty());
    minute.unwrap_or("unknown").to_owned()
}
