//! The command line.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use redis::{Cmd, cmd};

use crate::connect::Connection;
use crate::duration::{parse, parse_some};
use crate::permits::{self, Asked};

/// Distributed locks on Redis and Valkey: run a command under one, and see their holders.
///
/// The server needs the RLOCK module.
#[derive(Debug, Parser)]
#[command(name = "rlock", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) connection: Connection,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Box<Run>),
    /// List the locks that are held or waited for
    Ls(Listing),
    /// Show the holder of a lock and its queue
    Info(Info),
    /// Show why a lock is taken, or an owner waits: the holder, the lock that it waits for, and on
    Why(Why),
    /// Tell what happened lately: holds lost or broken, deadlocks, long waits
    Log(Listing),
    /// List the client processes that hold or wait
    Sessions(Listing),
    /// End the hold of a lock in its holder's place
    Break(Break),
    /// Take an owner's wait out of a queue
    Cancel(Cancel),
    /// Tell how many permits may be out, or set it for all who ask for them
    Limit(Limit),
    /// Say what of the servers' settings is unsafe for locks, and what to do; status 1 if anything
    Doctor(Doctor),
    /// Watch the locks that are waited for, rates and sessions on a live screen
    Top {
        /// How often to look
        #[arg(long, value_name = "DUR", value_parser = parse, default_value = "1s")]
        every: Duration,
    },
    /// Serve the metrics of every node to Prometheus; several URLs are several nodes here
    Exporter {
        /// Where to listen
        #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9736")]
        listen: SocketAddr,
    },
    /// Print what makes a shell complete names and options: `source <(rlock completions bash)`
    Completions {
        /// For which shell
        shell: Shell,
    },
    /// Write man pages into a directory
    #[command(hide = true)]
    Man {
        /// It is made if it is not there
        directory: PathBuf,
    },
}

/// Which, and how many.
#[derive(Args, Debug)]
pub(crate) struct Listing {
    /// Those that match this pattern, as KEYS takes it
    #[arg(long = "match", value_name = "PATTERN")]
    pub(crate) pattern: Option<OsString>,

    /// The maximum number for each server
    #[arg(long, value_name = "N")]
    pub(crate) count: Option<usize>,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

impl Listing {
    /// A command that takes the same options.
    pub(crate) fn command(&self, name: &str) -> Cmd {
        let mut command = self.without_count(name);
        if let Some(count) = self.count {
            command.arg("COUNT").arg(count);
        }
        command
    }

    pub(crate) fn without_count(&self, name: &str) -> Cmd {
        let mut command = cmd(name);
        if let Some(pattern) = &self.pattern {
            command.arg("MATCH").arg(pattern.as_bytes());
        }
        command
    }
}

#[derive(Args, Debug)]
pub(crate) struct Info {
    /// The name of the lock
    pub(crate) name: OsString,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Why {
    /// The name of a lock, or an owner that waits
    #[arg(value_name = "NAME|OWNER")]
    pub(crate) name: OsString,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Break {
    /// The name of the lock
    pub(crate) name: OsString,

    /// Do not ask; needed without a terminal
    #[arg(short, long)]
    pub(crate) yes: bool,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Cancel {
    /// The name of the lock
    pub(crate) name: OsString,

    /// The waiter's owner, as `rlock info` shows it
    pub(crate) owner: OsString,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Limit {
    /// The name of the permits
    pub(crate) name: OsString,

    /// So many from now on, whatever those who ask name as their limit; 0 for none
    #[arg(value_name = "N", allow_negative_numbers = true, value_parser = permits::parse_limit)]
    pub(crate) most: Option<u32>,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Doctor {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Run a command while its lock is held, so that it runs once at a time everywhere
///
/// Waits for the lock, first come first served, runs the command without a shell, and gives the
/// lock back. If the lock is lost, the command is ended before another can have the lock; so it is
/// if rlock is killed. Several plain locks are taken at once. With -s or -x they are taken one
/// after the other, in the order of their names; if one cannot be had, the others are given back.
/// With --permits it takes permits of a semaphore, so that several commands run at a time; this
/// text holds for permits as for locks.
///
/// Exit status: the command's own; 128 + n if signal n ended it; 1, or -E, if the lock was not
/// acquired in time; 69 if the server is unreachable or unusable; 75 if the lock was lost and the
/// command ended; 124 after --max; 126 if the command cannot be run; 127 if there is none; 64 if
/// rlock was used wrongly.
///
/// The command finds `RLOCK_NAME`, `RLOCK_TOKEN` and `RLOCK_OWNER` in its environment; with several
/// names the first two have a line each. Times are 500ms, 30s, 5m, 2h; a bare number is seconds.
#[allow(
    clippy::struct_excessive_bools,
    reason = "each is an option of the command line"
)]
#[derive(Args, Debug)]
#[command(after_help = "Example: rlock run -n nightly-report -- ./report.sh --all")]
pub(crate) struct Run {
    /// Do not wait for the lock
    #[arg(short, long, conflicts_with = "timeout")]
    pub(crate) nonblock: bool,

    /// Wait at most so long for the lock
    #[arg(short = 'w', long, value_name = "SEC", value_parser = parse)]
    pub(crate) timeout: Option<Duration>,

    /// The exit status if the lock could not be acquired in time
    #[arg(short = 'E', long, value_name = "NUMBER", default_value = "1")]
    pub(crate) conflict_exit_code: u8,

    /// Print the holder of the lock while rlock waits, and the time of the wait, on standard error;
    /// on a terminal the holder is printed after a second in any case
    #[arg(short, long)]
    pub(crate) verbose: bool,

    /// Take a read-write lock, together with other readers
    #[arg(short, long, conflicts_with = "exclusive")]
    pub(crate) shared: bool,

    /// Take a read-write lock alone; without -s and -x it is a plain lock
    #[arg(short = 'x', long)]
    pub(crate) exclusive: bool,

    /// Take N of the LIMIT permits of a semaphore; without LIMIT the one that `rlock limit` has set
    #[arg(
        long,
        value_name = "N[/LIMIT]",
        value_parser = permits::parse,
        allow_hyphen_values = true, // so that -1 is refused as a value, with the bounds
        conflicts_with_all = ["shared", "exclusive"]
    )]
    pub(crate) permits: Option<Asked>,

    /// How long the lock stays if the whole machine vanishes; renewed while the command runs [30s]
    #[arg(long, value_name = "DUR", value_parser = parse)]
    pub(crate) lease: Option<Duration>,

    /// How long the lock stays after rlock was killed, and how long the server may be silent [5s]
    #[arg(long, value_name = "DUR", value_parser = parse)]
    pub(crate) grace: Option<Duration>,

    /// Hold the lock at least so long, so that a short job does not run again where clocks differ;
    /// SIGTERM does not shorten it, SIGINT does; a killed rlock keeps it for the grace only
    #[arg(long, value_name = "DUR", value_parser = parse)]
    pub(crate) at_least: Option<Duration>,

    /// End the command after this time, with status 124
    #[arg(long, value_name = "DUR", value_parser = parse_some)]
    pub(crate) max: Option<Duration>,

    /// What happens to the command when the lock is lost
    #[arg(long, value_enum, default_value = "term")]
    pub(crate) on_lost: OnLost,

    /// Between SIGTERM and SIGKILL, at most half of the grace [1s]
    #[arg(long, value_name = "DUR", value_parser = parse)]
    pub(crate) kill_after: Option<Duration>,

    /// The names of the locks
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<OsString>,

    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLost {
    /// SIGTERM, and SIGKILL after --kill-after
    Term,
    /// SIGKILL at once
    Kill,
    /// Nothing but a line on standard error: two commands may run at once
    Ignore,
}
