//! Arguments: the parsers beside a naive reader that goes by a table of each command's words.

use super::choices::Choices;
use crate::parsing::{
    AFTER, ALONE, ARITY, COUNT, EITHER, EITHER_MODE, EPOCH, GRACE, KEY_COUNT, LEASE, LIMIT,
    LIMIT_TO_SET, MATCH_LENGTH, OF_ALONE, OWNER_LENGTH, PERMITS as PERMITS_BOUNDS, PERMITS_ALONE,
    RESERVED, SESSION_LENGTH, TOKEN, WAIT, WANTED_ALONE, WRITER, naive_matches,
};
use rlock_core::request::{
    Acquire, Cancel, Events, Guard, KeyOnly, Limit, List, MultiAcquire, MultiRelease, MultiRenew,
    NamedKey, Release, Renew, WaitMode, key_places,
};
use rlock_core::{CommandError, Glob, Lease, Mode, Moment, Now, Permits, SessionRef, Token, Wait};

/// The kind of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Key,
    Owner,
    Lease,
    /// numkeys, and the keys after it.
    Keys,
    Session,
    Wait,
    Token,
    Permits,
    Limit,
    LimitToSet,
    Grace,
    Epoch,
    /// A life and the number of an event.
    After,
    Count,
    Pattern,
    /// An option's word is all there is.
    Nothing,
}
use Kind::{Count, Grace, Key, Keys, Nothing, Owner, Pattern, Session};

type Words = Vec<Vec<u8>>;

impl Kind {
    /// How many arguments stand after an option's word.
    fn width(self) -> usize {
        match self {
            Nothing => 0,
            Self::After => 2,
            _ => 1,
        }
    }
}

/// A command's arguments as its documentation has them.
struct Grammar {
    fixed: &'static [Kind],
    options: &'static [(&'static str, Kind)],
    /// Whether a word that is no option is one argument too many.
    is_fixed: bool,
    /// The parser: its request as words again, or the refusal.
    parse: fn(&[&[u8]]) -> Result<Words, CommandError>,
}

const MODES: [(&str, Kind); 2] = [("READ", Nothing), ("WRITE", Nothing)];
const PERMITS: [(&str, Kind); 2] = [("PERMITS", Kind::Permits), ("OF", Kind::Limit)];
const WAITS: [(&str, Kind); 5] = [
    ("BLOCK", Kind::Wait),
    ("QUEUE", Kind::Wait),
    ("SESSION", Session),
    ("ONCE", Nothing),
    ("WANTED", Nothing),
];

const GRAMMARS: [Grammar; 12] = [
    Grammar {
        fixed: &[Key, Owner, Kind::Lease],
        options: &[
            MODES[0], MODES[1], PERMITS[0], PERMITS[1], WAITS[0], WAITS[1], WAITS[2], WAITS[3],
            WAITS[4],
        ],
        is_fixed: false,
        parse: |args| Acquire::parse(args.iter().copied()).map(|of| acquire(&of)),
    },
    Grammar {
        fixed: &[Key, Owner],
        options: &[
            MODES[0],
            MODES[1],
            PERMITS[0],
            ("TOKEN", Kind::Token),
            ("LEASE", Kind::Lease),
        ],
        is_fixed: false,
        parse: |args| Release::parse(args.iter().copied()).map(|of| release(&of)),
    },
    Grammar {
        fixed: &[Key, Owner, Kind::Lease],
        options: &[
            MODES[0],
            MODES[1],
            ("PERMITS", Nothing),
            ("TOKEN", Kind::Token),
            WAITS[2],
            WAITS[4],
        ],
        is_fixed: false,
        parse: |args| Renew::parse(args.iter().copied()).map(|of| renew(&of)),
    },
    Grammar {
        fixed: &[Owner, Kind::Lease, Keys],
        options: &WAITS,
        is_fixed: false,
        parse: |args| {
            let several = MultiAcquire::parse(args.iter().copied())?;
            are_in_their_places(args, 3, &several.keys);
            Ok(acquire_several(&several))
        },
    },
    Grammar {
        fixed: &[Owner, Keys],
        options: &[],
        is_fixed: false,
        parse: |args| {
            let several = MultiRelease::parse(args.iter().copied())?;
            are_in_their_places(args, 2, &several.keys);
            Ok([vec![several.owner.to_vec()], named(&several.keys)].concat())
        },
    },
    Grammar {
        fixed: &[Owner, Kind::Lease, Keys],
        options: &[WAITS[2]],
        is_fixed: false,
        parse: |args| {
            let several = MultiRenew::parse(args.iter().copied())?;
            are_in_their_places(args, 3, &several.keys);
            Ok(renew_several(&several))
        },
    },
    Grammar {
        fixed: &[Key, Owner],
        options: &[MODES[0], MODES[1], ("PERMITS", Nothing)],
        is_fixed: false,
        parse: |args| {
            let of = Cancel::parse(args.iter().copied())?;
            let fixed = vec![of.key.to_vec(), of.owner.to_vec()];
            Ok([fixed, of.mode.map_or_else(Vec::new, mode_of)].concat())
        },
    },
    Grammar {
        fixed: &[Key],
        options: &[],
        is_fixed: true,
        parse: |args| KeyOnly::parse(args.iter().copied()).map(|of| vec![of.key.to_vec()]),
    },
    Grammar {
        fixed: &[Key, Kind::LimitToSet],
        options: &[],
        is_fixed: true,
        parse: |args| {
            let of = Limit::parse(args.iter().copied())?;
            let limit = of.limit.map_or(0, of_permits);
            Ok(vec![of.key.to_vec(), digits(limit)])
        },
    },
    Grammar {
        fixed: &[],
        options: &[("MATCH", Pattern), ("COUNT", Count)],
        is_fixed: false,
        parse: |args| List::parse(args.iter().copied()).map(|of| list(&of)),
    },
    Grammar {
        fixed: &[Session],
        options: &[
            ("EPOCH", Kind::Epoch),
            ("AFTER", Kind::After),
            ("BLOCK", Kind::Wait),
            ("GRACE", Grace),
        ],
        is_fixed: false,
        parse: |args| Events::parse(args.iter().copied()).map(|of| events(&of)),
    },
    Grammar {
        fixed: &[Key, Owner],
        options: &[
            MODES[0],
            MODES[1],
            ("PERMITS", Nothing),
            ("TOKEN", Kind::Token),
        ],
        is_fixed: false,
        parse: |args| match Guard::parse(args.iter().copied()) {
            // Nothing else is wrong with these.
            Err(CommandError::NoCall) => guard(args),
            parsed => parsed.map(|of| panic!("there is no CALL: {of:?}")),
        },
    },
];

/// The same with a command to be run, whose words are like options and keys.
fn guard(args: &[&[u8]]) -> Result<Words, CommandError> {
    let call = [&b"caLL"[..], b"TOKEN", b"CALL", b"k"];
    let of = Guard::parse(args.iter().chain(&call).copied())?;
    assert_eq!((of.place, of.command), (args.len() + 2, &b"TOKEN"[..]));
    let fixed = vec![of.key.to_vec(), of.owner.to_vec()];
    Ok([fixed, mode_of(of.mode), token_of(of.token)].concat())
}

/// Any arguments become a request that says the same, and says it again when it is written down, in
/// other cases and another order; or a text that names the fault.
pub fn requests(data: &[u8]) {
    let mut choices = Choices::new(data);
    let grammar = &GRAMMARS[choices.below(GRAMMARS.len())];
    let args = arguments(grammar, &mut choices);
    if args.iter().any(|arg| arg.eq_ignore_ascii_case(b"CALL")) {
        // Drawn where an option stands, it would begin the command that GUARD runs.
        return;
    }
    let of_parser = parse(grammar, &args);
    assert_eq!(of_parser, read(grammar, &args), "{}", shown(&args));
    let canonical = match of_parser {
        Ok(canonical) => canonical,
        Err(text) => return is_fit_to_be_shown(&text),
    };
    let again = parse(grammar, &canonical);
    assert_eq!(
        again.as_ref(),
        Ok(&canonical),
        "written: {}",
        shown(&canonical)
    );
    let turned = turned_round(grammar, &canonical);
    let turned_again = parse(grammar, &turned);
    assert_eq!(turned_again, Ok(canonical), "turned: {}", shown(&turned));
}

/// A pattern matches what the naive matcher says.
pub fn globs(data: &[u8]) {
    let mut choices = Choices::new(data);
    let (mut pattern, mut text) = (Vec::new(), Vec::new());
    for _ in 0..choices.below(12) {
        piece(&mut choices, &mut pattern);
    }
    for _ in 0..choices.below(16) {
        text.push(any_of(b"abc-^]\\", &mut choices));
    }
    let (shown, of_text) = (pattern.escape_ascii(), text.escape_ascii());
    let matches = Glob::new(&pattern).matches(&text);
    assert_eq!(
        matches,
        naive_matches(&pattern, &text),
        "{shown} on {of_text}"
    );
}

/// A piece of a pattern: whole classes more often than their parts.
fn piece(choices: &mut Choices<'_>, pattern: &mut Vec<u8>) {
    match choices.below(6) {
        0 => pattern.push(b'*'),
        1 => pattern.push(b'?'),
        2 => pattern.extend([b'\\', any_of(b"abc]*", choices)]),
        3 => pattern.push(any_of(b"abc[]^-\\", choices)),
        _ => {
            pattern.push(b'[');
            pattern.extend(choices.one_in(3).then_some(b'^'));
            for _ in 0..choices.below(4) {
                match choices.below(3) {
                    0 => pattern.extend([any_of(b"abc", choices), b'-', any_of(b"abc]", choices)]),
                    _ => pattern.push(any_of(b"abc-^\\", choices)),
                }
            }
            pattern.extend((!choices.one_in(4)).then_some(b']'));
        }
    }
}

/// Now and then any byte at all.
fn any_of(table: &[u8], choices: &mut Choices<'_>) -> u8 {
    if choices.one_in(16) {
        return choices.number().to_le_bytes()[0];
    }
    choices.of(table)
}

/// Printable, on a line, and not without its code word.
fn is_fit_to_be_shown(text: &str) {
    let printable = text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    assert!(printable && text.len() < 400, "{text}");
    assert!(text.starts_with("ERR "), "{text}");
}

fn parse(grammar: &Grammar, args: &Words) -> Result<Words, String> {
    let args: Vec<&[u8]> = args.iter().map(Vec::as_slice).collect();
    (grammar.parse)(&args).map_err(|refusal| refusal.to_string())
}

fn shown(args: &Words) -> String {
    let words = args.iter().map(|word| word.escape_ascii().to_string());
    words.collect::<Vec<_>>().join(" ")
}

// --- What is sent --------------------------------------------------------------------------------

/// Mostly arguments that the command takes, so that a wrong one stands at any place.
fn arguments(grammar: &Grammar, choices: &mut Choices<'_>) -> Words {
    let mut args = Words::new();
    for kind in grammar.fixed {
        if choices.one_in(16) {
            return args;
        }
        if *kind == Keys && !choices.one_in(16) {
            let keys: Words = (0..=choices.below(4)).map(|_| key(choices)).collect();
            args.push(keys.len().to_string().into_bytes());
            args.extend(keys);
        } else {
            args.push(argument(*kind, choices));
        }
    }
    while !choices.are_over() && args.len() < 40 {
        let odd = ("", Pattern);
        let option = choices.below(grammar.options.len() + 1);
        let (word, kind) = *grammar.options.get(option).unwrap_or(&odd);
        let mut word = word.as_bytes().to_vec();
        if option == grammar.options.len() {
            word = anything(choices);
        } else if choices.one_in(3) {
            word.make_ascii_lowercase();
        }
        args.push(word);
        for _ in 0..kind.width() {
            if !choices.one_in(16) {
                args.push(argument(kind, choices));
            }
        }
    }
    args
}

/// Few names, so that some are named twice.
fn key(choices: &mut Choices<'_>) -> Vec<u8> {
    choices.of(&[&b"k"[..], b"", b"\xff\0", b"{k}"]).to_vec()
}

/// Mostly one that fits.
fn argument(kind: Kind, choices: &mut Choices<'_>) -> Vec<u8> {
    if choices.one_in(8) {
        return anything(choices);
    }
    match kind {
        Owner | Session | Pattern if choices.one_in(8) => {
            let length = choices.of(&[0, 1, 1023, 1024, 1025]);
            vec![choices.of(b"o\0\xff"); length]
        }
        Key | Pattern => choices.bytes(4),
        Owner | Session => choices
            .of(&[
                &b"o"[..],
                b"fence",
                b"mode",
                b"o:write",
                b"Fence",
                b"\xff\0",
            ])
            .to_vec(),
        _ => choices
            .of(&[
                "1",
                "7",
                "0",
                "1024",
                "2147483647",
                "9007199254740991",
                "9223372036854775807",
            ])
            .into(),
    }
}

fn anything(choices: &mut Choices<'_>) -> Vec<u8> {
    match choices.below(4) {
        0 => choices.bytes(9),
        1 => choices.number().to_string().into_bytes(),
        2 => choices
            .of(&[
                "READ", "write", "BLOCK", "queue", "SESSION", "ONCE", "TOKEN", "LEASE", "MATCH",
                "COUNT", "GRACE", "EPOCH", "AFTER", "PERMITS", "of", "STOP", "WANTED",
            ])
            .into(),
        _ => choices
            .of(&[
                "-1",
                "-0",
                "+1",
                "01",
                " 1",
                "1025",
                "9007199254740992",
                "9223372036854775808",
                "-9223372036854775808",
                "-9223372036854775809",
                "99999999999999999999999",
                "",
            ])
            .into(),
    }
}

/// The same request in other words: the options last first, and in small letters.
fn turned_round(grammar: &Grammar, canonical: &Words) -> Words {
    let mut options: Vec<Words> = Vec::new();
    let fixed = fixed_length(grammar, canonical);
    let mut rest = canonical[fixed..].iter();
    while let Some(word) = rest.next() {
        let kind = kind_of(grammar, word).expect("written by ourselves");
        let value = rest.by_ref().take(kind.width()).cloned();
        options.push(
            [word.to_ascii_lowercase()]
                .into_iter()
                .chain(value)
                .collect(),
        );
    }
    options.reverse();
    [canonical[..fixed].to_vec(), options.concat()].concat()
}

fn fixed_length(grammar: &Grammar, canonical: &Words) -> usize {
    let keys = grammar.fixed.iter().position(|kind| *kind == Keys);
    let count = keys.map_or(0, |at| number(&canonical[at]).unwrap());
    grammar.fixed.len() + usize::try_from(count).unwrap()
}

// --- The naive reader ----------------------------------------------------------------------------

/// The request as it is written down, or the text that names the first thing that is wrong.
fn read(grammar: &Grammar, args: &Words) -> Result<Words, String> {
    let mut rest = args.iter();
    let mut words = Words::new();
    for kind in grammar.fixed {
        let word = rest.next().ok_or(ARITY)?;
        check(*kind, word)?;
        if *kind == Keys {
            let mut keys = Words::new();
            for _ in 0..number(word).unwrap() {
                let key = rest.next().ok_or(KEY_COUNT)?;
                if !keys.contains(key) {
                    keys.push(key.clone());
                }
            }
            words.push(keys.len().to_string().into_bytes());
            words.extend(keys);
        } else {
            words.push(word.clone());
        }
    }
    let mut given: Vec<(&str, Words)> = Vec::new();
    while let Some(word) = rest.next() {
        if grammar.is_fixed {
            return Err(ARITY.into());
        }
        given.push(option(grammar, word, &mut rest, &given)?);
    }
    go_together(&given, args)?;
    for (name, _) in grammar.options {
        let value = given.iter().find(|(of, _)| of == name);
        // GRACE 0 means the same as no GRACE.
        let Some((_, value)) = value.filter(|(of, value)| *of != "GRACE" || value[0] != b"0")
        else {
            continue;
        };
        words.push(name.as_bytes().to_vec());
        words.extend(value.clone());
    }
    Ok(words)
}

/// One option with its value.
fn option<'g>(
    grammar: &'g Grammar,
    word: &[u8],
    rest: &mut std::slice::Iter<'_, Vec<u8>>,
    given: &[(&str, Words)],
) -> Result<(&'g str, Words), String> {
    let is_it = |(name, _): &&(&str, Kind)| word.eq_ignore_ascii_case(name.as_bytes());
    let found = grammar.options.iter().find(is_it);
    let shown = quoted(word);
    let (name, kind) = found.ok_or(format!("ERR unknown option '{shown}'"))?;
    let value: Words = rest.by_ref().take(kind.width()).cloned().collect();
    if value.len() < kind.width() {
        return Err(format!("ERR option '{shown}' needs a value"));
    }
    if given.iter().any(|(of, _)| of == name) {
        return Err(format!("ERR option '{shown}' is given twice"));
    }
    let is_mode = |name: &str| ["READ", "WRITE", "PERMITS"].contains(&name);
    let other = given.iter().find(|(of, _)| is_mode(of));
    if let Some((other, _)) = other.filter(|_| is_mode(name)) {
        let is_permits = [name, *other].contains(&"PERMITS");
        return Err(if is_permits {
            PERMITS_ALONE
        } else {
            EITHER_MODE
        }
        .into());
    }
    for word in &value {
        check(*kind, word)?;
    }
    Ok((name, value))
}

/// The options that exclude each other.
fn go_together(given: &[(&str, Words)], args: &Words) -> Result<(), String> {
    let has = |name| given.iter().any(|(of, _)| *of == name);
    if has("QUEUE") && has("BLOCK") {
        return Err(EITHER.into());
    }
    if has("QUEUE") && !has("SESSION") {
        return Err(ALONE.into());
    }
    if has("WANTED") && !has("SESSION") {
        return Err(WANTED_ALONE.into());
    }
    if (has("READ") || has("WRITE")) && args[1].ends_with(b":write") {
        return Err(WRITER.into());
    }
    let value = |name| {
        let of = given.iter().find(|(of, _)| *of == name);
        of.and_then(|(_, value)| number(value.first()?))
    };
    match (has("PERMITS"), value("PERMITS"), value("OF")) {
        (false, _, Some(_)) => Err(OF_ALONE.into()),
        (true, permits, Some(limit)) if permits > Some(limit) => Err(format!(
            "ERR permits must not exceed their limit, which is {limit}"
        )),
        _ => Ok(()),
    }
}

/// Whether a value is within its bounds.
fn check(kind: Kind, value: &[u8]) -> Result<(), &'static str> {
    const MAX: i64 = (1 << 53) - 1;
    let within = |low, high| number(value).is_some_and(|of| (low..=high).contains(&of));
    let (fits, otherwise) = match kind {
        Key | Nothing => (true, ""),
        Pattern => (value.len() <= 1024, MATCH_LENGTH),
        Owner if value == b"fence" || value == b"mode" => (false, RESERVED),
        Owner => ((1..=1024).contains(&value.len()), OWNER_LENGTH),
        Session => ((1..=1024).contains(&value.len()), SESSION_LENGTH),
        Keys => (within(1, 1024), KEY_COUNT),
        Kind::Lease => (within(1, MAX), LEASE),
        Kind::Wait => (within(0, MAX), WAIT),
        Kind::Token => (within(1, i64::MAX), TOKEN),
        Kind::Permits => (within(1, 2_147_483_647), PERMITS_BOUNDS),
        Kind::Limit => (within(1, 2_147_483_647), LIMIT),
        Kind::LimitToSet => (within(0, 2_147_483_647), LIMIT_TO_SET),
        Grace => (within(0, 3_600_000), GRACE),
        Kind::Epoch => (within(0, MAX), EPOCH),
        Kind::After => (within(0, MAX), AFTER),
        Count => (within(1, MAX), COUNT),
    };
    if fits { Ok(()) } else { Err(otherwise) }
}

fn kind_of(grammar: &Grammar, word: &[u8]) -> Option<Kind> {
    let mut options = grammar.options.iter();
    let found = options.find(|(name, _)| word == name.as_bytes());
    found.map(|(_, kind)| *kind)
}

fn number(value: &[u8]) -> Option<i64> {
    crate::parsing::integer(str::from_utf8(value).ok()?)
}

/// A word as an error shows it: 64 bytes of it.
fn quoted(word: &[u8]) -> String {
    match word.get(..64) {
        Some(start) if word.len() > 64 => format!("{}...", start.escape_ascii()),
        _ => word.escape_ascii().to_string(),
    }
}

/// The keys of a request are those words of the command that the server was told are keys, each
/// once.
fn are_in_their_places(args: &[&[u8]], numkeys: usize, keys: &[NamedKey<'_>]) {
    let places = key_places(args.iter().copied(), numkeys).expect("accepted, so they are there");
    let mut seen: Vec<NamedKey<'_>> = Vec::new();
    for place in places {
        let name = args[place - 1];
        if !seen.iter().any(|key| key.name == name) {
            seen.push(NamedKey { place, name });
        }
    }
    assert_eq!(seen, keys);
}

// --- A request in words --------------------------------------------------------------------------

fn lease_ms(lease: Lease) -> Vec<u8> {
    let (wall_us, mono_ms) = (0, 0);
    digits(lease.end(Now { wall_us, mono_ms }))
}

fn digits<N: ToString + Copy>(number: N) -> Vec<u8> {
    number.to_string().into_bytes()
}

fn option_of(word: &str, value: Option<Vec<u8>>) -> Words {
    let word = value.is_some().then(|| word.as_bytes().to_vec());
    word.into_iter().chain(value).collect()
}

fn mode_of(mode: Mode) -> Words {
    let word: &[u8] = match mode {
        Mode::Plain => return Words::new(),
        Mode::Read => b"READ",
        Mode::Write => b"WRITE",
        Mode::Permits => b"PERMITS",
    };
    vec![word.to_vec()]
}

fn of_permits(permits: Permits) -> i64 {
    permits.get()
}

fn waits(wait_mode: WaitMode, session: Option<SessionRef<'_>>, once: bool, wanted: bool) -> Words {
    let (block, queue) = match wait_mode {
        WaitMode::None => (None, None),
        WaitMode::Block(wait) => (Some(digits(wait.ms())), None),
        WaitMode::Queue(wait) => (None, Some(digits(wait.ms()))),
    };
    let once: Words = once.then(|| b"ONCE".to_vec()).into_iter().collect();
    [
        option_of("BLOCK", block),
        option_of("QUEUE", queue),
        session_of(session),
        once,
        wanted_of(wanted),
    ]
    .concat()
}

fn session_of(session: Option<SessionRef<'_>>) -> Words {
    option_of("SESSION", session.map(|session| session.name.to_vec()))
}

fn wanted_of(wanted: bool) -> Words {
    wanted.then(|| b"WANTED".to_vec()).into_iter().collect()
}

fn token_of(token: Option<Token>) -> Words {
    option_of("TOKEN", token.map(|token| digits(token.get())))
}

fn named(keys: &[NamedKey<'_>]) -> Words {
    let names = keys.iter().map(|key| key.name.to_vec());
    [digits(keys.len())].into_iter().chain(names).collect()
}

fn acquire(of: &Acquire<'_>) -> Words {
    let fixed = vec![of.key.to_vec(), of.owner.to_vec(), lease_ms(of.lease)];
    let waits = waits(of.wait_mode, of.session, of.once, of.wanted);
    let permits = of.asked.map(|asked| digits(of_permits(asked.permits)));
    let limit = of.asked.and_then(|asked| asked.limit);
    let limit = option_of("OF", limit.map(|limit| digits(of_permits(limit))));
    let permits = permits.into_iter().collect();
    [fixed, mode_of(of.mode), permits, limit, waits].concat()
}

fn release(of: &Release<'_>) -> Words {
    let fixed = vec![of.key.to_vec(), of.owner.to_vec()];
    let lease = option_of("LEASE", of.lease.map(lease_ms));
    let permits = of.permits.map(|permits| digits(of_permits(permits)));
    let permits = permits.into_iter().collect();
    let token = token_of(of.token);
    [fixed, mode_of(of.mode), permits, token, lease].concat()
}

fn renew(of: &Renew<'_>) -> Words {
    let fixed = vec![of.key.to_vec(), of.owner.to_vec(), lease_ms(of.lease)];
    [
        fixed,
        mode_of(of.mode),
        token_of(of.token),
        session_of(of.session),
        wanted_of(of.wanted),
    ]
    .concat()
}

fn acquire_several(of: &MultiAcquire<'_>) -> Words {
    let fixed = vec![of.owner.to_vec(), lease_ms(of.lease)];
    let waits = waits(of.wait_mode, of.session, of.once, of.wanted);
    [fixed, named(&of.keys), waits].concat()
}

fn renew_several(of: &MultiRenew<'_>) -> Words {
    let fixed = vec![of.owner.to_vec(), lease_ms(of.lease)];
    [fixed, named(&of.keys), session_of(of.session)].concat()
}

fn list(of: &List<'_>) -> Words {
    let pattern = option_of("MATCH", of.pattern.map(<[u8]>::to_vec));
    [pattern, option_of("COUNT", of.count.map(digits))].concat()
}

fn events(of: &Events<'_>) -> Words {
    let block = option_of("BLOCK", of.block.map(Wait::ms).map(digits));
    let grace = (of.grace_ms > 0).then(|| digits(of.grace_ms));
    let after = of.after.map_or_else(Vec::new, |Moment { life, seq }| {
        let seq = i64::try_from(seq).unwrap();
        vec![b"AFTER".to_vec(), digits(life), digits(seq)]
    });
    [
        vec![of.session.name.to_vec()],
        option_of(
            "EPOCH",
            of.epoch.map(|epoch| digits(i64::try_from(epoch).unwrap())),
        ),
        after,
        block,
        option_of("GRACE", grace),
    ]
    .concat()
}
