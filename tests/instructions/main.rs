//! How many instructions of the server each operation costs: `make instructions`.
//!
//! Unlike time these hardly differ from run to run, however busy the machine is. The server runs
//! under callgrind; an operation is done a number of times and twice as often, and what that makes
//! more is its cost: instructions in user space, with the reading of the command and the sending of
//! the reply. The figures are compared with those in `figures.txt`.
#![allow(missing_docs, reason = "a program")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::cast_precision_loss,
    clippy::print_stdout,
    reason = "a program that prints, and stops when something is not as it should be"
)]

mod blocked;
mod counted;
mod figures;
mod operations;
mod replica;
mod scripts;

use std::path::Path;
use std::process::ExitCode;

use counted::Counted;
use figures::Figures;
use operations::{Operation, UNPUBLISHED};
use scripts::Scripts;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    let accept = words.iter().any(|word| word == "--accept");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("instructions");
    let mut server = Counted::start(&folder);
    let version = server.server.info("redis_version").unwrap();

    let mut counted = Figures::new(&version);
    let scripts = Scripts::load(server.conn());
    for operation in operations::all(scripts) {
        counted.add(operation.name, count(&mut server, &operation));
    }
    counted.add(blocked::ALONE, blocked::count_alone(&mut server));
    counted.add(blocked::IN_QUEUE, blocked::count_in_queue(&mut server));

    drop(server);
    let of_primary = folder.with_file_name("instructions-primary");
    replica::count_primary(&of_primary, &mut counted);
    replica::count_aof(&folder.with_file_name("instructions-aof"), &mut counted);
    replica::count(&folder.with_file_name("instructions-replica"), &mut counted);

    println!("profiles, for callgrind_annotate: {}\n", folder.display());
    if accept {
        counted.write();
        return ExitCode::SUCCESS;
    }
    counted.compare(&Figures::read())
}

/// The number of keys for which commands are sent at a time.
const KEYS: usize = 10;

/// How often that is done to be counted; and then twice as often.
const TIMES: usize = 5;

/// Each is counted so often, and the least counts: some have a tick of the server's clock in them,
/// in which it does half a million instructions of its own.
const ROUNDS: usize = 16;

/// The instructions of one operation.
fn count(server: &mut Counted, operation: &Operation) -> u64 {
    let for_keys = |steps: &dyn Fn(&str) -> Vec<operations::Step>| -> Vec<operations::Step> {
        (0..KEYS)
            .flat_map(|number| steps(&format!("lock:{number}")))
            .collect()
    };
    let publish = if operation.name == UNPUBLISHED {
        "off"
    } else {
        "auto"
    };
    let set = format!("CONFIG SET rlock.publish {publish}");
    assert_eq!(server.conn().run(set), "OK");
    server.run(&for_keys(&operation.before));
    let steps = for_keys(&operation.steps);
    let cost = difference(server, KEYS, |server| server.run(&steps));
    server.keep_profile(operation.name);
    server.run(&for_keys(&operation.after));
    cost
}

/// The instructions of each of the `many` operations that `run` does.
fn difference(server: &mut Counted, many: usize, mut run: impl FnMut(&mut Counted)) -> u64 {
    let mut counted = |server: &mut Counted, times: usize| {
        server.count();
        (0..times).for_each(|_| run(server));
        server.count()
    };
    counted(server, TIMES);
    let mut rounds = |times| (0..ROUNDS).map(|_| counted(server, times)).min().unwrap();
    let (once, twice) = (rounds(TIMES), rounds(2 * TIMES));
    (twice - once) / (TIMES * many) as u64
}
