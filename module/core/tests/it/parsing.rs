//! Any bytes that a client may send: argument by argument, with the text that it gets.

use proptest::prelude::*;
use rlock_core::request::{
    Acquire, Bind, Cancel, Events, KeyOnly, Limit, List, MultiAcquire, MultiRelease, MultiRenew,
    NamedKey, Release, Renew,
};
use rlock_core::{
    CommandError, Count, Glob, KEYS_MAX, Kind, Lease, Mode, Permits, PermitsRequest, Token,
    TokenMint, Wait,
};

pub(crate) const LEASE: &str = "ERR lease-ms must be an integer from 1 to 9007199254740991";
pub(crate) const WAIT: &str = "ERR wait-ms must be an integer from 0 to 9007199254740991";
pub(crate) const TOKEN: &str = "ERR token must be an integer from 1 to 9223372036854775807";
pub(crate) const MATCH_LENGTH: &str = "ERR pattern must have at most 1024 bytes";
pub(crate) const COUNT: &str = "ERR COUNT must be an integer from 1 to 9007199254740991";
pub(crate) const GRACE: &str = "ERR grace-ms must be an integer from 0 to 3600000";
pub(crate) const EPOCH: &str = "ERR EPOCH must be an integer from 0 to 9007199254740991";
pub(crate) const AFTER: &str = "ERR AFTER must be a life and the number of an event, \
                                integers from 0 to 9007199254740991";
pub(crate) const SESSION_LENGTH: &str = "ERR session must have 1 to 1024 bytes";
pub(crate) const EITHER: &str = "ERR option 'QUEUE' cannot be combined with 'BLOCK'";
pub(crate) const ALONE: &str = "ERR option 'QUEUE' needs 'SESSION'";
pub(crate) const WANTED_ALONE: &str = "ERR option 'WANTED' needs 'SESSION'";
pub(crate) const OWNER_LENGTH: &str = "ERR owner must have 1 to 1024 bytes";
pub(crate) const RESERVED: &str =
    "ERR owner must not be 'fence' or 'mode', fields of the lock itself";
pub(crate) const WRITER: &str =
    "ERR owner must not end in ':write' with READ or WRITE, as a writer's field does";
pub(crate) const PERMITS: &str = "ERR permits must be an integer from 1 to 2147483647";
pub(crate) const LIMIT: &str = "ERR OF must be an integer from 1 to 2147483647";
pub(crate) const LIMIT_TO_SET: &str = "ERR limit must be an integer from 0 to 2147483647";
pub(crate) const PERMITS_ALONE: &str =
    "ERR option 'PERMITS' cannot be combined with 'READ' or 'WRITE'";
pub(crate) const OF_ALONE: &str = "ERR option 'OF' needs 'PERMITS'";
pub(crate) const EITHER_MODE: &str = "ERR option 'WRITE' cannot be combined with 'READ'";
pub(crate) const KEY_COUNT: &str =
    "ERR numkeys must be an integer from 1 to 1024, and so many keys must follow";
pub(crate) const ARITY: &str = "ERR wrong number of arguments";

/// The words of all options.
const WORDS: [&str; 14] = [
    "BLOCK", "once", "TOKEN", "LEASE", "MATCH", "COUNT", "queue", "SESSION", "GRACE", "READ",
    "write", "2", "EPOCH", "after",
];

/// The arguments of a table's line: words between blanks.
fn words(line: &str) -> Vec<&[u8]> {
    line.split_ascii_whitespace().map(str::as_bytes).collect()
}

/// A parsed request, in words, or the error text.
fn shown<T>(parsed: Result<T, CommandError>, show: impl Fn(T) -> String) -> String {
    parsed.map_or_else(|refusal| refusal.to_string(), show)
}

/// Of a plain lock nothing.
fn in_words(mode: Mode) -> &'static str {
    match mode {
        Mode::Plain => "",
        Mode::Read => " READ",
        Mode::Write => " WRITE",
        Mode::Permits => " PERMITS",
    }
}

fn asked_in_words(asked: Option<PermitsRequest>) -> String {
    let Some(PermitsRequest { permits, limit }) = asked else {
        return String::new();
    };
    let limit = limit.map_or(String::new(), |limit| format!(" of {}", limit.get()));
    format!(" {}{limit}", permits.get())
}

fn limit(args: &[&[u8]]) -> String {
    shown(Limit::parse(args.iter().copied()), |limit| {
        let Limit { key, limit } = limit;
        format!("{} {:?}", key.escape_ascii(), limit.map(Permits::get))
    })
}

fn acquire(args: &[&[u8]]) -> String {
    shown(Acquire::parse(args.iter().copied()), |acquire| {
        let Acquire {
            key,
            owner,
            lease,
            mode,
            asked,
            wait_mode,
            session,
            wanted,
            once,
        } = acquire;
        let (key, owner) = (key.escape_ascii(), owner.escape_ascii());
        let session = session.map(|session| session.name.escape_ascii().to_string());
        let (mode, permits) = (in_words(mode), asked_in_words(asked));
        let wanted = if wanted { " wanted" } else { "" };
        format!("{key} {owner} {lease:?}{mode}{permits} {wait_mode:?} {session:?} {once}{wanted}")
    })
}

fn release(args: &[&[u8]]) -> String {
    shown(Release::parse(args.iter().copied()), |release| {
        let Release {
            key,
            owner,
            mode,
            permits,
            token,
            lease,
            by,
        } = release;
        assert_eq!(by, None, "no argument");
        let token = token.map(Token::get);
        let (key, owner) = (key.escape_ascii(), owner.escape_ascii());
        let mode = in_words(mode);
        let permits = permits.map_or(String::new(), |permits| format!(" {}", permits.get()));
        format!("{key} {owner}{mode}{permits} {token:?} {lease:?}")
    })
}

fn renew(args: &[&[u8]]) -> String {
    shown(Renew::parse(args.iter().copied()), |renew| {
        let Renew {
            key,
            owner,
            lease,
            mode,
            token,
            session,
            wanted,
        } = renew;
        let token = token.map(Token::get);
        let (key, owner) = (key.escape_ascii(), owner.escape_ascii());
        let session = session.map(|session| session.name.escape_ascii().to_string());
        let mode = in_words(mode);
        let wanted = if wanted { " wanted" } else { "" };
        format!("{key} {owner} {lease:?}{mode} {token:?} {session:?}{wanted}")
    })
}

/// Each key with its place.
fn in_places(keys: &[NamedKey<'_>]) -> String {
    let one = |key: &NamedKey<'_>| format!("{}:{}", key.place, key.name.escape_ascii());
    keys.iter().map(one).collect::<Vec<_>>().join(",")
}

fn acquire_several(args: &[&[u8]]) -> String {
    shown(MultiAcquire::parse(args.iter().copied()), |acquire| {
        let MultiAcquire {
            owner,
            lease,
            keys,
            wait_mode,
            session,
            wanted,
            once,
        } = acquire;
        let (owner, keys) = (owner.escape_ascii(), in_places(&keys));
        let session = session.map(|session| session.name.escape_ascii().to_string());
        let wanted = if wanted { " wanted" } else { "" };
        format!("{owner} {lease:?} {keys} {wait_mode:?} {session:?} {once}{wanted}")
    })
}

fn release_several(args: &[&[u8]]) -> String {
    shown(MultiRelease::parse(args.iter().copied()), |release| {
        let MultiRelease { owner, keys, by } = release;
        assert_eq!(by, None, "no argument");
        format!("{} {}", owner.escape_ascii(), in_places(&keys))
    })
}

fn renew_several(args: &[&[u8]]) -> String {
    shown(MultiRenew::parse(args.iter().copied()), |renew| {
        let MultiRenew {
            owner,
            lease,
            keys,
            session,
        } = renew;
        let (owner, keys) = (owner.escape_ascii(), in_places(&keys));
        let session = session.map(|session| session.name.escape_ascii().to_string());
        format!("{owner} {lease:?} {keys} {session:?}")
    })
}

fn events(args: &[&[u8]]) -> String {
    shown(Events::parse(args.iter().copied()), |events| {
        let Events {
            session,
            epoch,
            after,
            block,
            grace_ms,
        } = events;
        let epoch = epoch.map_or(String::new(), |epoch| format!(" epoch {epoch}"));
        let after = after.map_or(String::new(), |after| {
            format!(" after {} of {}", after.seq, after.life)
        });
        let name = session.name.escape_ascii();
        format!("{name}{epoch}{after} {block:?} {grace_ms}")
    })
}

fn bind(args: &[&[u8]]) -> String {
    shown(Bind::parse(args.iter().copied()), |bind| {
        format!("{} {}", bind.session.name.escape_ascii(), bind.epoch)
    })
}

fn cancel(args: &[&[u8]]) -> String {
    shown(Cancel::parse(args.iter().copied()), |cancel| {
        let Cancel { key, owner, mode } = cancel;
        let mode = mode.map_or(String::new(), |mode| format!(" {mode:?}"));
        format!("{} {}{mode}", key.escape_ascii(), owner.escape_ascii())
    })
}

fn key_only(args: &[&[u8]]) -> String {
    shown(KeyOnly::parse(args.iter().copied()), |only| {
        only.key.escape_ascii().to_string()
    })
}

fn list(args: &[&[u8]]) -> String {
    shown(List::parse(args.iter().copied()), |list| {
        let pattern = list
            .pattern
            .map(|pattern| pattern.escape_ascii().to_string());
        format!("{pattern:?} {:?}", list.count)
    })
}

/// Compares each line's arguments with the expected request or error.
fn check(parse: impl Fn(&[&[u8]]) -> String, table: &[(&str, &str)]) {
    for (line, expected) in table {
        assert_eq!(parse(&words(line)), *expected, "arguments: {line}");
    }
}

#[test]
fn acquire_reads_its_arguments() {
    check(
        acquire,
        &[
            ("k o 1", "k o Lease(1) None None false"),
            (
                "k o 9007199254740991 BLOCK 9007199254740991",
                "k o Lease(9007199254740991) Block(Wait(9007199254740991)) None false",
            ),
            (
                "k o 30000 BLOCK 0 ONCE",
                "k o Lease(30000) Block(Wait(0)) None true",
            ),
            (
                "k o 30000 once bLoCk 5",
                "k o Lease(30000) Block(Wait(5)) None true",
            ),
            ("k once 30000 ONCE", "k once Lease(30000) None None true"),
            ("", ARITY),
            ("k", ARITY),
            ("k o", ARITY),
            ("k o 0", LEASE),
            ("k o -1", LEASE),
            ("k o -0", LEASE),
            ("k o +1", LEASE),
            ("k o 01", LEASE),
            ("k o 1.0", LEASE),
            ("k o 1e3", LEASE),
            ("k o 0x10", LEASE),
            ("k o 9007199254740992", LEASE),
            ("k o 9223372036854775807", LEASE),
            ("k o 9223372036854775808", LEASE),
            ("k o -9223372036854775808", LEASE),
            ("k o 99999999999999999999999999", LEASE),
            ("k o lease", LEASE),
            ("k fence 1", RESERVED),
            ("k mode 1", RESERVED),
            ("k Fence 1", "k Fence Lease(1) None None false"),
            ("k o 1 BLOCK", "ERR option 'BLOCK' needs a value"),
            ("k o 1 block", "ERR option 'block' needs a value"),
            ("k o 1 BLOCK -1", WAIT),
            ("k o 1 BLOCK 9007199254740992", WAIT),
            ("k o 1 BLOCK ONCE", WAIT),
            ("k o 1 BLOCK 1 BLOCK 2", "ERR option 'BLOCK' is given twice"),
            ("k o 1 BLOCK 1 block x", "ERR option 'block' is given twice"),
            ("k o 1 ONCE ONCE", "ERR option 'ONCE' is given twice"),
            ("k o 1 GRACE 5", "ERR unknown option 'GRACE'"),
            ("k o 1 TOKEN 5", "ERR unknown option 'TOKEN'"),
            ("k o 1 ONCE 5", "ERR unknown option '5'"),
            ("k o 1 BLOCKS 5", "ERR unknown option 'BLOCKS'"),
        ],
    );
}

#[test]
fn acquire_reads_what_concerns_sessions() {
    check(
        acquire,
        &[
            (
                "k o 1 SESSION s QUEUE 0",
                "k o Lease(1) Queue(Wait(0)) Some(\"s\") false",
            ),
            (
                "k o 1 once queue 7 session QUEUE",
                "k o Lease(1) Queue(Wait(7)) Some(\"QUEUE\") true",
            ),
            (
                "k o 1 BLOCK 7 SESSION s",
                "k o Lease(1) Block(Wait(7)) Some(\"s\") false",
            ),
            ("k o 1 SESSION s", "k o Lease(1) None Some(\"s\") false"),
            (
                "k o 1 wanted SESSION s",
                "k o Lease(1) None Some(\"s\") false wanted",
            ),
            (
                "k wanted 1 READ SESSION WANTED QUEUE 0 ONCE WANTED",
                "k wanted Lease(1) READ Queue(Wait(0)) Some(\"WANTED\") true wanted",
            ),
            ("k o 1 WANTED", WANTED_ALONE),
            ("k o 1 WANTED BLOCK 1", WANTED_ALONE),
            (
                "k o 1 SESSION s WANTED wanted",
                "ERR option 'wanted' is given twice",
            ),
            ("k o 1 SESSION s WANTED 1", "ERR unknown option '1'"),
            ("k o 1 QUEUE", "ERR option 'QUEUE' needs a value"),
            ("k o 1 QUEUE -1", WAIT),
            ("k o 1 QUEUE 9007199254740992", WAIT),
            ("k o 1 QUEUE SESSION s", WAIT),
            ("k o 1 QUEUE 1 queue 1", "ERR option 'queue' is given twice"),
            ("k o 1 QUEUE 1", ALONE),
            ("k o 1 QUEUE 1 ONCE", ALONE),
            ("k o 1 QUEUE 1 BLOCK 1", EITHER),
            ("k o 1 BLOCK 1 SESSION s QUEUE 1", EITHER),
            ("k o 1 SESSION", "ERR option 'SESSION' needs a value"),
            (
                "k o 1 SESSION s SESSION s",
                "ERR option 'SESSION' is given twice",
            ),
        ],
    );
}

#[test]
fn release_and_renew_read_their_arguments() {
    check(
        release,
        &[
            ("k o", "k o None None"),
            ("k o TOKEN 1", "k o Some(1) None"),
            (
                "k o lease 7 token 9223372036854775807",
                "k o Some(9223372036854775807) Some(Lease(7))",
            ),
            ("", ARITY),
            ("k", ARITY),
            ("k fence", RESERVED),
            ("k o TOKEN", "ERR option 'TOKEN' needs a value"),
            ("k o TOKEN 0", TOKEN),
            ("k o TOKEN -7", TOKEN),
            ("k o TOKEN t7", TOKEN),
            ("k o TOKEN 9223372036854775808", TOKEN),
            ("k o TOKEN 1 TOKEN 1", "ERR option 'TOKEN' is given twice"),
            ("k o LEASE 0", LEASE),
            ("k o LEASE", "ERR option 'LEASE' needs a value"),
            ("k o LEASE 1 LEASE 1", "ERR option 'LEASE' is given twice"),
            ("k o 5", "ERR unknown option '5'"),
            ("k o ONCE", "ERR unknown option 'ONCE'"),
        ],
    );
    check(
        renew,
        &[
            ("k o 5", "k o Lease(5) None None"),
            ("k o 5 ToKeN 8", "k o Lease(5) Some(8) None"),
            (
                "k o 5 session s token 8",
                "k o Lease(5) Some(8) Some(\"s\")",
            ),
            (
                "k o 5 WaNtEd WRITE session s",
                "k o Lease(5) WRITE None Some(\"s\") wanted",
            ),
            ("k o 5 WANTED TOKEN 8", WANTED_ALONE),
            (
                "k o 5 WANTED SESSION s WANTED",
                "ERR option 'WANTED' is given twice",
            ),
            ("k o 5 SESSION", "ERR option 'SESSION' needs a value"),
            (
                "k o 5 SESSION s SESSION t",
                "ERR option 'SESSION' is given twice",
            ),
            ("k o", ARITY),
            ("k mode 5", RESERVED),
            ("k o 0", LEASE),
            ("k o TOKEN 8", LEASE),
            ("k o 5 TOKEN", "ERR option 'TOKEN' needs a value"),
            ("k o 5 TOKEN 0", TOKEN),
            ("k o 5 TOKEN 8 token 8", "ERR option 'token' is given twice"),
            ("k o 5 LEASE 8", "ERR unknown option 'LEASE'"),
        ],
    );
}

#[test]
fn acquire_reads_how_the_lock_is_to_be_held() {
    check(
        acquire,
        &[
            ("k o 1 READ", "k o Lease(1) READ None None false"),
            ("k o 1 write", "k o Lease(1) WRITE None None false"),
            (
                "k o 1 once ReAd session s queue 7",
                "k o Lease(1) READ Queue(Wait(7)) Some(\"s\") true",
            ),
            (
                "k o 1 BLOCK 5 WRITE",
                "k o Lease(1) WRITE Block(Wait(5)) None false",
            ),
            ("READ WRITE 1", "READ WRITE Lease(1) None None false"),
            ("k o 1 READ READ", "ERR option 'READ' is given twice"),
            ("k o 1 READ read", "ERR option 'read' is given twice"),
            (
                "k o 1 WRITE ONCE write",
                "ERR option 'write' is given twice",
            ),
            ("k o 1 READ WRITE", EITHER_MODE),
            ("k o 1 WRITE ONCE READ", EITHER_MODE),
            ("k o 1 WRITE READ READ", EITHER_MODE),
            ("k o 1 READS", "ERR unknown option 'READS'"),
            ("k o 1 READ 5", "ERR unknown option '5'"),
            ("k o 1 BLOCK READ", WAIT),
            ("k o:write 1", "k o:write Lease(1) None None false"),
            ("k o:write 1 READ", WRITER),
            ("k o:write 1 WRITE", WRITER),
            ("k :write 1 READ", WRITER),
            (
                "k o:write 1 WRITE WRITE",
                "ERR option 'WRITE' is given twice",
            ),
            (
                "k o:WRITE 1 READ",
                "k o:WRITE Lease(1) READ None None false",
            ),
            (
                "k o:write: 1 READ",
                "k o:write: Lease(1) READ None None false",
            ),
            ("k write 1 WRITE", "k write Lease(1) WRITE None None false"),
            ("k mode 1 READ", RESERVED),
        ],
    );
}

#[test]
fn release_and_renew_read_how_the_lock_is_held() {
    check(
        release,
        &[
            ("k o READ", "k o READ None None"),
            (
                "k o token 7 WRITE lease 5",
                "k o WRITE Some(7) Some(Lease(5))",
            ),
            ("k o READ READ", "ERR option 'READ' is given twice"),
            ("k o READ WRITE", EITHER_MODE),
            ("k o TOKEN READ", TOKEN),
            ("k o:write", "k o:write None None"),
            ("k o:write READ", WRITER),
            ("k o:write WRITE", WRITER),
        ],
    );
    check(
        renew,
        &[
            ("k o 5 WRITE", "k o Lease(5) WRITE None None"),
            (
                "k o 5 session read read",
                "k o Lease(5) READ None Some(\"read\")",
            ),
            ("k o 5 WRITE WRITE", "ERR option 'WRITE' is given twice"),
            ("k o 5 WRITE READ", EITHER_MODE),
            ("k o READ 5", LEASE),
            ("k o:write 5", "k o:write Lease(5) None None"),
            ("k o:write 5 READ", WRITER),
            ("k o:write 5 WRITE", WRITER),
        ],
    );
    assert_eq!(key_only(&words("k READ")), ARITY);
    assert_eq!(list(&words("READ")), "ERR unknown option 'READ'");
    assert_eq!(events(&words("s WRITE")), "ERR unknown option 'WRITE'");
}

#[test]
fn acquire_several_reads_its_arguments() {
    check(
        acquire_several,
        &[
            ("o 1 1 k", "o Lease(1) 4:k None None false"),
            ("o 1 3 c a b", "o Lease(1) 4:c,5:a,6:b None None false"),
            // Named twice counts once, where it was named first.
            ("o 1 4 b a b a", "o Lease(1) 4:b,5:a None None false"),
            ("o 1 2 k k ONCE", "o Lease(1) 4:k None None true"),
            // A word like an option is a key where keys are expected.
            (
                "o 1 2 ONCE BLOCK",
                "o Lease(1) 4:ONCE,5:BLOCK None None false",
            ),
            (
                "o 1 2 a b once session s queue 7",
                "o Lease(1) 4:a,5:b Queue(Wait(7)) Some(\"s\") true",
            ),
            (
                "o 1 2 a b BLOCK 0",
                "o Lease(1) 4:a,5:b Block(Wait(0)) None false",
            ),
            (
                "o 1 2 wanted b SESSION s WANTED",
                "o Lease(1) 4:wanted,5:b None Some(\"s\") false wanted",
            ),
            ("o 1 1 k WANTED", WANTED_ALONE),
            ("o:write 1 1 k", "o:write Lease(1) 4:k None None false"),
            ("", ARITY),
            ("o", ARITY),
            ("o 1", ARITY),
            ("fence 1 1 k", RESERVED),
            ("mode 0 0", RESERVED),
            ("o 0 1 k", LEASE),
            ("o x 1 k", LEASE),
            ("o 1 0", KEY_COUNT),
            ("o 1 0 k", KEY_COUNT),
            ("o 1 -1 k", KEY_COUNT),
            ("o 1 01 k", KEY_COUNT),
            ("o 1 one k", KEY_COUNT),
            ("o 1 1025 k", KEY_COUNT),
            ("o 1 9223372036854775808 k", KEY_COUNT),
            ("o 1 1", KEY_COUNT),
            ("o 1 3 a b", KEY_COUNT),
            ("o 1 1 a b", "ERR unknown option 'b'"),
            ("o 1 1 k READ", "ERR unknown option 'READ'"),
            ("o 1 1 k WRITE", "ERR unknown option 'WRITE'"),
            ("o 1 1 k TOKEN 5", "ERR unknown option 'TOKEN'"),
            ("o 1 1 k QUEUE 1", ALONE),
            ("o 1 1 k QUEUE 1 BLOCK 1 SESSION s", EITHER),
            ("o 1 1 k ONCE ONCE", "ERR option 'ONCE' is given twice"),
            ("o 1 1 k BLOCK", "ERR option 'BLOCK' needs a value"),
            ("o 1 1 k BLOCK -1", WAIT),
        ],
    );
}

#[test]
fn release_and_renew_several_read_their_arguments() {
    check(
        release_several,
        &[
            ("o 1 k", "o 3:k"),
            ("o 3 b a b", "o 3:b,4:a"),
            ("o 2 TOKEN 5", "o 3:TOKEN,4:5"),
            ("", ARITY),
            ("o", ARITY),
            ("mode 1 k", RESERVED),
            ("o 0", KEY_COUNT),
            ("o k", KEY_COUNT),
            ("o 2 k", KEY_COUNT),
            ("o 1025 k", KEY_COUNT),
            ("o 1 k ONCE", "ERR unknown option 'ONCE'"),
            ("o 1 k READ", "ERR unknown option 'READ'"),
        ],
    );
    check(
        renew_several,
        &[
            ("o 5 1 k SESSION s WANTED", "ERR unknown option 'WANTED'"),
            ("o 5 1 k", "o Lease(5) 4:k None"),
            ("o 5 3 a a b session s", "o Lease(5) 4:a,6:b Some(\"s\")"),
            ("o 5 1 SESSION", "o Lease(5) 4:SESSION None"),
            ("o 5", ARITY),
            ("fence 5 1 k", RESERVED),
            ("o 0 1 k", LEASE),
            ("o 5 0", KEY_COUNT),
            ("o 5 2 k", KEY_COUNT),
            ("o 5 1 k SESSION", "ERR option 'SESSION' needs a value"),
            (
                "o 5 1 k SESSION s SESSION s",
                "ERR option 'SESSION' is given twice",
            ),
            ("o 5 1 k TOKEN 5", "ERR unknown option 'TOKEN'"),
            ("o 5 1 k WRITE", "ERR unknown option 'WRITE'"),
        ],
    );
}

#[test]
fn as_many_keys_are_read_as_one_command_can_name() {
    let names: Vec<String> = (0..=KEYS_MAX).map(|at| format!("k{at}")).collect();
    let keys: Vec<&[u8]> = names.iter().map(String::as_bytes).collect();
    let most: Vec<&[u8]> = [&b"o"[..], b"1024"]
        .into_iter()
        .chain(keys[..KEYS_MAX].iter().copied())
        .collect();
    let request = MultiRelease::parse(most.into_iter()).unwrap();
    let read: Vec<(usize, &[u8])> = request
        .keys
        .iter()
        .map(|key| (key.place, key.name))
        .collect();
    let should: Vec<(usize, &[u8])> = (3..).zip(keys[..KEYS_MAX].iter().copied()).collect();
    assert_eq!(read, should);
    let too_many: Vec<&[u8]> = [&b"o"[..], b"1025"].into_iter().chain(keys).collect();
    assert_eq!(release_several(&too_many), KEY_COUNT);
    // Any bytes are a key, and none of them is taken for another.
    let odd: [&[u8]; 6] = [b"o", b"4", b"", b"\0", b"\xff", b""];
    assert_eq!(release_several(&odd), r"o 3:,4:\x00,5:\xff");
}

#[test]
fn the_others_read_their_arguments() {
    check(
        cancel,
        &[
            ("k o", "k o"),
            ("k", ARITY),
            ("", ARITY),
            ("k o x", "ERR unknown option 'x'"),
            ("k fence", RESERVED),
            ("k o read", "k o Read"),
            ("k o WRITE", "k o Write"),
            ("k o permits", "k o Permits"),
            ("k o PERMITS 1", "ERR unknown option '1'"),
            ("k o READ WRITE", EITHER_MODE),
            ("k o READ PERMITS", PERMITS_ALONE),
            ("k o READ read", "ERR option 'read' is given twice"),
            ("k o:write", "k o:write"),
            ("k o:write READ", WRITER),
        ],
    );
    check(key_only, &[("k", "k"), ("", ARITY), ("k o", ARITY)]);
    check(
        list,
        &[
            ("", "None None"),
            ("MATCH a* COUNT 3", "Some(\"a*\") Some(3)"),
            (
                "count 9007199254740991 match MATCH",
                "Some(\"MATCH\") Some(9007199254740991)",
            ),
            ("MATCH", "ERR option 'MATCH' needs a value"),
            ("MATCH a MATCH b", "ERR option 'MATCH' is given twice"),
            ("COUNT", "ERR option 'COUNT' needs a value"),
            ("COUNT 0", COUNT),
            ("COUNT -1", COUNT),
            ("COUNT many", COUNT),
            ("COUNT 9007199254740992", COUNT),
            ("COUNT 1 COUNT 1", "ERR option 'COUNT' is given twice"),
            ("k", "ERR unknown option 'k'"),
        ],
    );
}

#[test]
fn the_commands_of_sessions_read_their_arguments() {
    check(
        bind,
        &[
            ("s EPOCH 0", "s 0"),
            ("EPOCH epoch 9007199254740991", "EPOCH 9007199254740991"),
            ("", ARITY),
            ("s", ARITY),
            ("s 1", "ERR unknown option '1'"),
            ("s EPOCH", "ERR option 'EPOCH' needs a value"),
            ("s EPOCH -1", EPOCH),
            ("s EPOCH 9007199254740992", EPOCH),
            ("s EPOCH 1 EPOCH 2", "ERR unknown option 'EPOCH'"),
            ("s GRACE 1", "ERR unknown option 'GRACE'"),
        ],
    );
    check(
        events,
        &[
            ("s", "s None 0"),
            ("s block 0", "s Some(Wait(0)) 0"),
            (
                "BLOCK GRACE 3600000 BLOCK 9007199254740991",
                "BLOCK Some(Wait(9007199254740991)) 3600000",
            ),
            ("s grace 0", "s None 0"),
            ("", ARITY),
            ("s BLOCK", "ERR option 'BLOCK' needs a value"),
            ("s BLOCK -1", WAIT),
            ("s BLOCK 9007199254740992", WAIT),
            ("s BLOCK 1 BLOCK 1", "ERR option 'BLOCK' is given twice"),
            ("s GRACE", "ERR option 'GRACE' needs a value"),
            ("s GRACE -1", GRACE),
            ("s GRACE 3600001", GRACE),
            ("s GRACE 9007199254740991", GRACE),
            ("s GRACE 1 grace 1", "ERR option 'grace' is given twice"),
            ("s t", "ERR unknown option 't'"),
            ("s EPOCH 0", "s epoch 0 None 0"),
            (
                "s grace 7 after 5 0 epoch 2 block 1",
                "s epoch 2 after 0 of 5 Some(Wait(1)) 7",
            ),
            ("s EPOCH -1", EPOCH),
            ("s EPOCH 9007199254740992", EPOCH),
            ("s EPOCH 1 EPOCH 1", "ERR option 'EPOCH' is given twice"),
            ("s AFTER", "ERR option 'AFTER' needs a value"),
            ("s AFTER 1", "ERR option 'AFTER' needs a value"),
            ("s AFTER 1 x", AFTER),
            ("s AFTER -1 0", AFTER),
            ("s AFTER 1 -1", AFTER),
            ("s AFTER 9007199254740992 1", AFTER),
            ("s AFTER 1 9007199254740992", AFTER),
            ("s AFTER 1 2 AFTER 1 2", "ERR option 'AFTER' is given twice"),
        ],
    );
}

#[test]
fn hostile_bytes_are_arguments_like_others() {
    let mega = vec![b'o'; 1 << 20];
    let longest = vec![0xff; 1024];
    let too_long = vec![0xff; 1025];
    for key in [&b""[..], b"\0", b"\xff\xfe", b"fence", &mega] {
        assert_eq!(KeyOnly::parse([key].into_iter()).unwrap().key, key);
        assert_eq!(Cancel::parse([key, b"\0"].into_iter()).unwrap().key, key);
    }
    for (owner, expected) in [
        (&b""[..], Err(OWNER_LENGTH)),
        (b"\0", Ok(())),
        (b"\xff", Ok(())),
        (b" fence", Ok(())),
        (b"fence\0", Ok(())),
        (&longest, Ok(())),
        (&too_long, Err(OWNER_LENGTH)),
        (&mega, Err(OWNER_LENGTH)),
    ] {
        let args = [b"k", owner, b"5"];
        let answers = [
            Acquire::parse(args.into_iter()).map(|request| request.owner),
            Renew::parse(args.into_iter()).map(|request| request.owner),
            Release::parse(args[..2].iter().copied()).map(|request| request.owner),
            Cancel::parse(args[..2].iter().copied()).map(|request| request.owner),
            MultiAcquire::parse([owner, b"5", b"1", b"k"].into_iter()).map(|request| request.owner),
            MultiRelease::parse([owner, b"1", b"k"].into_iter()).map(|request| request.owner),
            MultiRenew::parse([owner, b"5", b"1", b"k"].into_iter()).map(|request| request.owner),
        ];
        for answer in answers {
            let answer = answer.map_err(|refusal| refusal.to_string());
            let expected = expected.map(|()| owner).map_err(String::from);
            assert_eq!(answer, expected, "an owner of {} bytes", owner.len());
        }
    }
}

#[test]
fn hostile_sessions_and_numbers_are_answered() {
    let mega = vec![b'o'; 1 << 20];
    let longest = vec![0xff; 1024];
    let too_long = vec![0xff; 1025];
    for (session, expected) in [
        (&b""[..], Some(SESSION_LENGTH)),
        (b"\0", None),
        (b"fence", None),
        (&longest, None),
        (&too_long, Some(SESSION_LENGTH)),
        (&mega, Some(SESSION_LENGTH)),
    ] {
        let args = [&b"k"[..], b"o", b"5", b"SESSION", session];
        let several = [&b"o"[..], b"5", b"1", b"k", b"SESSION", session];
        let answers = [
            Acquire::parse(args.into_iter()).map(|request| request.session),
            Renew::parse(args.into_iter()).map(|request| request.session),
            Events::parse([session].into_iter()).map(|request| Some(request.session)),
            Bind::parse([session, b"EPOCH", b"1"].into_iter()).map(|of| Some(of.session)),
            MultiAcquire::parse(several.into_iter()).map(|request| request.session),
            MultiRenew::parse(several.into_iter()).map(|request| request.session),
        ];
        for answer in answers {
            let answer = answer.map_err(|refusal| refusal.to_string());
            let expected = expected.map_or(Ok(Some(session.into())), |text| Err(text.to_string()));
            assert_eq!(answer, expected, "a session of {} bytes", session.len());
        }
    }
    for number in [
        &b""[..],
        b" 1",
        b"1 ",
        b"1\0",
        b"\x001",
        b"1\n",
        b"-",
        b"\xff",
        &mega,
    ] {
        assert_eq!(acquire(&[b"k", b"o", number]), LEASE);
        assert_eq!(acquire(&[b"k", b"o", b"1", b"BLOCK", number]), WAIT);
        assert_eq!(acquire(&[b"k", b"o", b"1", b"QUEUE", number]), WAIT);
        assert_eq!(release(&[b"k", b"o", b"TOKEN", number]), TOKEN);
        assert_eq!(events(&[b"s", b"BLOCK", number]), WAIT);
        assert_eq!(events(&[b"s", b"GRACE", number]), GRACE);
        assert_eq!(events(&[b"s", b"EPOCH", number]), EPOCH);
        assert_eq!(events(&[b"s", b"AFTER", number, b"1"]), AFTER);
        assert_eq!(events(&[b"s", b"AFTER", b"1", number]), AFTER);
        assert_eq!(bind(&[b"s", b"EPOCH", number]), EPOCH);
        assert_eq!(list(&[b"COUNT", number]), COUNT);
        assert_eq!(acquire_several(&[b"o", b"1", number, b"k"]), KEY_COUNT);
        assert_eq!(release_several(&[b"o", number, b"k"]), KEY_COUNT);
        assert_eq!(renew_several(&[b"o", b"1", number, b"k"]), KEY_COUNT);
    }
}

#[test]
fn a_pattern_that_is_too_long_is_refused() {
    let pattern = [b'*'; 1025];
    assert_eq!(list(&[b"MATCH", &pattern]), MATCH_LENGTH);
    assert!(!list(&[b"MATCH", &pattern[1..]]).starts_with("ERR"));
    assert!(!list(&[b"MATCH", b""]).starts_with("ERR"));
}

#[test]
fn an_offending_word_is_shown_so_that_it_fits_a_line() {
    let mega = vec![0xff; 1 << 20];
    for (word, shown) in [
        (&b""[..], String::new()),
        (b"\0\r\n\xff'", r"\x00\r\n\xff\'".into()),
        (&[b'x'; 64], "x".repeat(64)),
        (&[b'x'; 65], "x".repeat(64) + "..."),
        (&mega, r"\xff".repeat(64) + "..."),
    ] {
        let expected = format!("ERR unknown option '{shown}'");
        assert_eq!(acquire(&[b"k", b"o", b"1", word]), expected);
        assert_eq!(list(&[word]), expected);
    }
}

#[test]
fn a_hundred_arguments_are_read_to_the_first_wrong_one() {
    let mut args: Vec<&[u8]> = vec![b"k", b"o", b"5"];
    args.resize(100, b"ONCE");
    assert_eq!(acquire(&args), "ERR option 'ONCE' is given twice");
    args.fill(b"5");
    assert_eq!(release(&args), "ERR unknown option '5'");
    assert_eq!(renew(&args), "ERR unknown option '5'");
    assert_eq!(events(&args), "ERR unknown option '5'");
    assert_eq!(cancel(&args), "ERR unknown option '5'");
    assert_eq!(key_only(&args), ARITY);
    assert_eq!(list(&args), "ERR unknown option '5'");
}

#[test]
#[allow(clippy::too_many_lines, reason = "one table")]
fn every_refusal_begins_with_a_code_word_and_stays_on_a_line() {
    let moved = CommandError::Moved {
        slot: 16_383,
        address: "127.0.0.1:7001".into(),
        tls_address: "10.0.0.1:7001".into(),
    };
    let table = [
        (
            CommandError::HoldCountOverflow,
            "ERR hold count must stay within 1 to 2147483647",
        ),
        (
            CommandError::HoldCountMalformed,
            "ERR hold count of this owner is not an integer from 1 to 2147483647, it was written \
             by somebody else",
        ),
        (
            CommandError::TooManyWaiters(7),
            "QUEUEFULL too many waiters, rlock.max-waiters-per-lock is 7",
        ),
        (
            CommandError::WrongType,
            "WRONGTYPE Operation against a key holding the wrong kind of value",
        ),
        (
            wrong_kind(Kind::ReadWrite, Kind::Plain),
            "WRONGKIND the key holds a read-write lock, not a plain one",
        ),
        (
            wrong_kind(Kind::Plain, Kind::ReadWrite),
            "WRONGKIND the key holds a plain lock, not a read-write one",
        ),
        (
            wrong_kind(Kind::Permits, Kind::Plain),
            "WRONGKIND the key holds permits, not a plain lock",
        ),
        (
            wrong_kind(Kind::Permits, Kind::ReadWrite),
            "WRONGKIND the key holds permits, not a read-write lock",
        ),
        (
            wrong_kind(Kind::Plain, Kind::Permits),
            "WRONGKIND the key holds a plain lock, not permits",
        ),
        (
            wrong_kind(Kind::ReadWrite, Kind::Permits),
            "WRONGKIND the key holds a read-write lock, not permits",
        ),
        (
            CommandError::Held,
            "HELD this owner holds permits of this key already, ONCE begins their lease anew",
        ),
        (
            CommandError::NoLimit,
            "NOLIMIT no limit is set with RLOCK.LIMIT, and PERMITS names none with OF",
        ),
        (
            CommandError::PermitsNotHeld(3),
            "ERR permits given back must not exceed those held, whose number is 3",
        ),
        (
            CommandError::LimitInOtherSlot,
            "CROSSSLOT key cannot have a limit in a cluster, its braces put the key of the limit \
             in another slot: name the limit with OF",
        ),
        (
            CommandError::LimitOnItsWay,
            "TRYAGAIN the key's slot is on its way to another node, and with it the limit of \
             permits",
        ),
        (
            CommandError::NoSessionConnection,
            "ERR RLOCK.EVENTS needs a connection to live by, so not here within another call",
        ),
        (
            CommandError::Waiting,
            "WAITING this owner waits for the lock already, ONCE takes that wait over",
        ),
        (
            CommandError::ChainTooLong,
            "QUEUEFULL more than 10000 owners, or 100000 of their waits and holds, would have to \
             be looked at to rule out a deadlock",
        ),
        (
            CommandError::Unsettled,
            "TRYAGAIN the locks change while the command looks at them",
        ),
        (
            CommandError::Unblocked,
            "UNBLOCKED force unblock from blocking operation, instance state changed (master -> \
             replica?)",
        ),
        (
            CommandError::TimeoutsInOtherSlot,
            "CROSSSLOT key cannot be locked with READ in a cluster, its braces put the timeout \
             keys of readers in another slot",
        ),
        (
            CommandError::SlotOnItsWay,
            "TRYAGAIN the key's slot is on its way to another node, and with it the timeout keys \
             of readers",
        ),
        (moved, "MOVED 16383 127.0.0.1:7001"),
    ];
    for (refusal, text) in table {
        assert_eq!(refusal.to_string(), text);
    }
}

#[test]
fn permits_and_limits_are_read_as_documented() {
    let table = [
        ("k o 1 PERMITS 3", "k o Lease(1) PERMITS 3 None None false"),
        (
            "k o 1 PERMITS 3 OF 5",
            "k o Lease(1) PERMITS 3 of 5 None None false",
        ),
        (
            "k o:write 1 of 5 BLOCK 0 permits 5",
            "k o:write Lease(1) PERMITS 5 of 5 Block(Wait(0)) None false",
        ),
        (
            "k o 1 PERMITS 2147483647 ONCE",
            "k o Lease(1) PERMITS 2147483647 None None true",
        ),
        ("k o 1 PERMITS", "ERR option 'PERMITS' needs a value"),
        ("k o 1 PERMITS 0", PERMITS),
        ("k o 1 PERMITS -1", PERMITS),
        ("k o 1 PERMITS 2147483648", PERMITS),
        ("k o 1 PERMITS one", PERMITS),
        ("k o 1 PERMITS 1 OF", "ERR option 'OF' needs a value"),
        ("k o 1 PERMITS 1 OF 0", LIMIT),
        ("k o 1 PERMITS 1 OF 2147483648", LIMIT),
        (
            "k o 1 PERMITS 6 OF 5",
            "ERR permits must not exceed their limit, which is 5",
        ),
        ("k o 1 OF 5", OF_ALONE),
        ("k o 1 READ PERMITS 1", PERMITS_ALONE),
        ("k o 1 PERMITS 1 WRITE", PERMITS_ALONE),
        (
            "k o 1 PERMITS 1 PERMITS 1",
            "ERR option 'PERMITS' is given twice",
        ),
        (
            "k o 1 PERMITS 1 OF 1 OF 1",
            "ERR option 'OF' is given twice",
        ),
    ];
    for (line, expected) in table {
        assert_eq!(acquire(&words(line)), expected, "{line}");
    }
    assert_eq!(release(&words("k o PERMITS 2")), "k o PERMITS 2 None None");
    assert_eq!(release(&words("k o PERMITS 0")), PERMITS);
    assert_eq!(
        release(&words("k o PERMITS 1 OF 1")),
        "ERR unknown option 'OF'"
    );
    assert_eq!(release(&words("k o READ PERMITS 1")), PERMITS_ALONE);
    assert_eq!(
        renew(&words("k o 1 PERMITS TOKEN 7")),
        "k o Lease(1) PERMITS Some(7) None"
    );
    assert_eq!(renew(&words("k o 1 PERMITS 1")), "ERR unknown option '1'");
    assert_eq!(limit(&words("k 8")), "k Some(8)");
    assert_eq!(limit(&words("k 0")), "k None");
    for wrong in ["k -1", "k 2147483648", "k x", "k 01"] {
        assert_eq!(limit(&words(wrong)), LIMIT_TO_SET, "{wrong}");
    }
    assert_eq!(limit(&words("k")), ARITY);
    assert_eq!(limit(&words("k 1 2")), ARITY);
}

fn wrong_kind(held: Kind, asked: Kind) -> CommandError {
    CommandError::WrongKind { held, asked }
}

#[test]
fn refusals_of_sessions_begin_with_a_code_word_too() {
    let table = [
        (
            CommandError::NoSession,
            "NOSESSION nobody listens to this session, RLOCK.EVENTS must be called first",
        ),
        (
            CommandError::SessionOfAnother,
            "NOPERM this session belongs to another ACL user, who began it",
        ),
        (
            CommandError::TooManySessions(7),
            "SESSIONSFULL too many sessions, rlock.max-sessions is 7",
        ),
        (
            CommandError::OutOfMemory,
            "OOM command not allowed when used memory > 'maxmemory'.",
        ),
        (
            CommandError::TakenOver(7),
            "TAKENOVER the connection that listens to this session now is 7",
        ),
        (
            CommandError::Stale(7),
            "STALE a later connection has named EPOCH 7 for this session",
        ),
        (
            CommandError::CannotBind,
            "ERR RLOCK.BIND needs a connection of its own, \
             so not here within MULTI or another call",
        ),
        (
            CommandError::BoundToAnother,
            "ERR this connection is bound to another session already",
        ),
        (
            CommandError::CannotClose,
            "ERR RLOCK.BIND cannot close the connection that was bound before, since this server's \
             command CLIENT is renamed",
        ),
    ];
    for (refusal, text) in table {
        assert_eq!(refusal.to_string(), text);
    }
}

#[test]
fn durations_have_bounds() {
    assert_eq!(Lease::from_ms(0), None);
    assert_eq!(Lease::from_ms(-1), None);
    assert!(Lease::from_ms(1).is_some());
    assert!(Lease::from_ms((1 << 53) - 1).is_some());
    assert_eq!(Lease::from_ms(1 << 53), None);
    assert_eq!(Wait::from_ms(-1), None);
    assert!(Wait::from_ms(0).is_some());
    assert!(Wait::from_ms((1 << 53) - 1).is_some());
    assert_eq!(Wait::from_ms(1 << 53), None);
    assert_eq!(Wait::from_ms(i64::MIN), None);
}

/// An integer as the server writes it: a text that is printed again as it was read.
pub(crate) fn integer(text: &str) -> Option<i64> {
    let number: i64 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// As [`Count::from_field`] shows what the core's integer reader made of the bytes.
fn as_count(text: &str) -> Count {
    match integer(text) {
        Some(count) if count >= 1 => Count::Valid(count),
        _ => Count::Malformed,
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn integers_are_read_as_the_standard_library_reads_them(
        text in prop_oneof!["[-+ 0]?[0-9]{0,21}", any::<i64>().prop_map(|n| n.to_string())],
        junk in any::<u8>(),
        at in 0usize..21,
    ) {
        prop_assert_eq!(Count::from_field(text.as_bytes()), as_count(&text));
        let token = integer(&text).and_then(Token::new);
        prop_assert_eq!(Token::from_field(format!("t{text}").as_bytes()), token);
        let asked = release(&[b"k", b"o", b"TOKEN", text.as_bytes()]);
        let expected = token.map_or(TOKEN.into(), |token| {
            format!("k o Some({}) None", token.get())
        });
        prop_assert_eq!(asked, expected);

        let mut spoiled = text.into_bytes();
        spoiled.insert(at.min(spoiled.len()), junk);
        let expected = str::from_utf8(&spoiled).map_or(Count::Malformed, as_count);
        prop_assert_eq!(Count::from_field(&spoiled), expected);
    }

    #[test]
    fn any_arguments_get_an_answer(
        args in proptest::collection::vec(
            prop_oneof![
                proptest::collection::vec(any::<u8>(), 0..6),
                proptest::sample::select(WORDS.to_vec())
                    .prop_map(|word| word.as_bytes().to_vec()),
                any::<i64>().prop_map(|number| number.to_string().into_bytes()),
            ],
            0..9,
        ),
    ) {
        let args: Vec<&[u8]> = args.iter().map(Vec::as_slice).collect();
        for parse in [
            acquire,
            release,
            renew,
            acquire_several,
            release_several,
            renew_several,
            cancel,
            key_only,
            list,
            events,
            bind,
        ] {
            let text = parse(&args);
            prop_assert!(text.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{}", text);
        }
    }

    #[test]
    fn globs_match_as_a_naive_matcher_says(
        pattern in r"([ab*?\\]|\[\^?[ab\\-]{0,4}\]?){0,6}",
        text in "[ab\\]\\[^\\\\-]{0,7}",
    ) {
        let naive = naive_matches(pattern.as_bytes(), text.as_bytes());
        prop_assert_eq!(Glob::new(pattern.as_bytes()).matches(text.as_bytes()), naive);
    }
}

#[test]
fn globs_of_every_kind() {
    for (pattern, text, matches) in [
        (&b""[..], &b""[..], true),
        (b"", b"a", false),
        (b"*", b"", true),
        (b"*", b"\0\xff", true),
        (b"?", b"", false),
        (b"?", b"\xff", true),
        (b"orders:*", b"orders:17", true),
        (b"orders:*", b"order:17", false),
        (b"h[ae]llo", b"hello", true),
        (b"h[^e]llo", b"hello", false),
        (b"h[^e]llo", b"hallo", true),
        (b"h[a-c]llo", b"hbllo", true),
        (b"h[c-a]llo", b"hbllo", true),
        (b"h[\\]]llo", b"h]llo", true),
        (b"\\*", b"*", true),
        (b"\\*", b"a", false),
        (b"\\", b"\\", true),
        (b"[abc", b"b", true),
        (b"[", b"b", false),
        (b"[^", b"b", true),
        (b"[]", b"]", false),
        (b"[a-]", b"^", true),
        (b"[a-]", b"-", false),
        (b"A", b"a", false),
        (b"*a*b*c", b"xaybzc", true),
        (b"*a*b*c", b"xaybz", false),
    ] {
        assert_eq!(
            Glob::new(pattern).matches(text),
            matches,
            "{} on {}",
            pattern.escape_ascii(),
            text.escape_ascii()
        );
    }
}

/// A matcher that tries every length for every `*` would be here until the sun goes out.
#[test]
fn an_adversarial_glob_ends() {
    let stars = b"a*".repeat(2_000);
    let text = vec![b'a'; 20_000];
    let with_end = [&stars[..], b"b"].concat();
    assert!(Glob::new(&stars).matches(&text));
    assert!(!Glob::new(&with_end).matches(&text));
    let classes = [&b"*[ab]".repeat(2_000)[..], b"b"].concat();
    assert!(!Glob::new(&classes).matches(&text));
}

/// By the book: an element of the pattern after the other, and after each the lengths of the text
/// that those so far can match.
pub(crate) fn naive_matches(pattern: &[u8], text: &[u8]) -> bool {
    let mut lengths = vec![true];
    lengths.resize(text.len() + 1, false);
    let mut pattern = pattern;
    while let Some((first, after)) = pattern.split_first() {
        if *first == b'*' {
            let shortest = lengths.iter().position(|can| *can).unwrap_or(lengths.len());
            lengths[shortest..].fill(true);
            pattern = after;
            continue;
        }
        let (members, negated, rest) = match (first, after) {
            (b'?', _) => (Vec::new(), true, after),
            (b'[', class) => {
                let (members, rest) = naive_class(class);
                (members, class.first() == Some(&b'^'), rest)
            }
            (b'\\', [literal, rest @ ..]) => (vec![(*literal, *literal)], false, rest),
            _ => (vec![(*first, *first)], false, after),
        };
        let fits = |byte: &u8| {
            let mut ranges = members.iter();
            ranges.any(|(low, high)| low <= byte && byte <= high) != negated
        };
        for length in (0..text.len()).rev() {
            lengths[length + 1] = lengths[length] && fits(&text[length]);
        }
        lengths[0] = false;
        pattern = rest;
    }
    lengths[text.len()]
}

/// The members of a class as ranges, and the bytes after the class.
fn naive_class(class: &[u8]) -> (Vec<(u8, u8)>, &[u8]) {
    let mut members = Vec::new();
    let mut at = usize::from(class.first() == Some(&b'^'));
    loop {
        let left = class.len() - at;
        let one = class.get(at).copied();
        let Some(one) = one else {
            return (members, &class[at..]);
        };
        if one == b'\\' && left >= 2 {
            members.push((class[at + 1], class[at + 1]));
            at += 2;
        } else if one == b']' {
            return (members, &class[at + 1..]);
        } else if left >= 3 && class[at + 1] == b'-' {
            let end = class[at + 2];
            members.push((one.min(end), one.max(end)));
            at += 3;
        } else {
            members.push((one, one));
            at += 1;
        }
    }
}

#[test]
fn tokens_are_read_from_a_field() {
    for (field, token) in [
        (&b"t1"[..], Some(1)),
        (b"t1795000000000000", Some(1_795_000_000_000_000)),
        (b"t9223372036854775807", Some(i64::MAX)),
        (b"t9223372036854775808", None),
        (b"", None),
        (b"t", None),
        (b"1", None),
        (b"T1", None),
        (b"tt1", None),
        (b"t0", None),
        (b"t-1", None),
        (b"t+1", None),
        (b"t01", None),
        (b"t 1", None),
        (b"t1 ", None),
        (b"t1\0", None),
        (b"\xff", None),
    ] {
        let read = Token::from_field(field).map(Token::get);
        assert_eq!(read, token, "{}", field.escape_ascii());
    }
}

#[test]
fn tokens_follow_the_clock_and_never_go_back() {
    let mut mint = TokenMint::default();
    let mut tokens = |wall_us| mint.mint(wall_us).get();
    assert_eq!(tokens(1_000_000), 1_000_000);
    // It stands still, goes on by less than there were grants, and is set back.
    assert_eq!(tokens(1_000_000), 1_000_001);
    assert_eq!(tokens(1_000_001), 1_000_002);
    assert_eq!(tokens(5), 1_000_003);
    assert_eq!(tokens(-5), 1_000_004);
    assert_eq!(tokens(2_000_000), 2_000_000);
    // Before 1970, and before anything was minted, a token is positive all the same.
    assert_eq!(TokenMint::default().mint(-7).get(), 1);
    assert_eq!(TokenMint::default().mint(0).get(), 1);
}

#[test]
fn tokens_grow_over_a_restart_with_a_slower_clock() {
    const GUARD_MS: i64 = 10_000;
    let mut before = TokenMint::default();
    before.start(1_000_000_000, GUARD_MS);
    let last = before.mint(1_000_000_000).get();
    assert_eq!(last, 1_000_000_000 + 10_000_000 + 1);
    // 15 seconds later the next server starts, and its clock is 9.9 seconds behind.
    let mut after = TokenMint::default();
    after.start(1_015_000_000 - 9_900_000, GUARD_MS);
    assert!(after.mint(1_015_000_000 - 9_900_000).get() > last);
    // A start on the same server never lowers the mark.
    before.start(5, GUARD_MS);
    assert_eq!(before.mint(5).get(), last + 1);
    before.start(i64::MAX, i64::MAX);
    assert_eq!(before.mint(5).get(), i64::MAX);
}

#[test]
fn a_token_tells_its_moment_only_if_the_clock_made_it() {
    let mut mint = TokenMint::default();
    let from_clock = mint.mint(5_000_000);
    assert_eq!(mint.minted_at(from_clock), Some(5_000_000));
    mint.start(6_000_000, 10_000);
    let ahead = mint.mint(6_000_000);
    assert_eq!(mint.minted_at(ahead), None);
    let caught_up = mint.mint(20_000_000);
    assert_eq!(mint.minted_at(caught_up), Some(20_000_000));
}

#[test]
fn a_client_over_tls_is_sent_to_another_address_and_told_all_else_alike() {
    let moved = CommandError::Moved {
        slot: 1,
        address: "127.0.0.1:7001".into(),
        tls_address: "127.0.0.1:7002".into(),
    };
    assert_eq!(moved.to_string(), "MOVED 1 127.0.0.1:7001");
    assert_eq!(moved.over_tls(), "MOVED 1 127.0.0.1:7002");
    let other = CommandError::WrongType;
    assert_eq!(other.over_tls(), other.to_string());
}
