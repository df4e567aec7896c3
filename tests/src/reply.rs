//! The server's replies in RESP2 and RESP3, as values that tests can inspect.

use std::fmt;

/// A reply of the server. Texts are bytes: an error may repeat whatever a client sent.
#[derive(Clone, PartialEq)]
pub enum Reply {
    /// `:1`
    Int(i64),
    /// `$3` and three bytes
    Bulk(Vec<u8>),
    /// `+OK`
    Simple(Vec<u8>),
    /// `-ERR …`, without the dash
    Error(Vec<u8>),
    /// `$-1`, `*-1`, or `_` of RESP3
    Null,
    /// `*2` and two replies
    Array(Vec<Self>),
    /// `%1` and a pair of replies (RESP3)
    Map(Vec<(Self, Self)>),
    /// `~2` and two replies (RESP3)
    Set(Vec<Self>),
    /// `>2` and two replies: told without having been asked (RESP3)
    Push(Vec<Self>),
    /// `,1.5` (RESP3)
    Double(f64),
    /// `#t` (RESP3)
    Bool(bool),
}

/// An event of a session.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Its number in the session's life.
    pub seq: i64,
    /// Kind, key and owner as one text.
    pub what: String,
    /// The value, whose meaning depends on the kind.
    pub value: Reply,
    /// The token of the hold that it is about, 0 without one.
    pub token: i64,
    /// The mode of the wait or hold.
    pub mode: String,
    /// The database of the lock.
    pub db: i64,
}

impl Reply {
    /// The first reply in `bytes` and how many bytes it took; `None`: not all of it is there yet.
    ///
    /// ```
    /// use rlock_tests::Reply;
    /// assert_eq!(Reply::decode(b":12\r\nrest"), Some((Reply::Int(12), 5)));
    /// assert_eq!(Reply::decode(b"$5\r\nhal"), None);
    /// ```
    pub fn decode(bytes: &[u8]) -> Option<(Self, usize)> {
        let mut input = Input { bytes, at: 0 };
        let reply = input.reply()?;
        Some((reply, input.at))
    }

    /// `[count, token]` of a lock that is held.
    #[track_caller]
    pub fn held(&self) -> (i64, i64) {
        match self.ints()[..] {
            [count, token] if count >= 1 && token >= 1 => (count, token),
            _ => panic!("not held, but {self:?}"),
        }
    }

    /// `ttl-ms` of `[0, ttl-ms]`: the lock was refused.
    #[track_caller]
    pub fn refused(&self) -> i64 {
        match self.ints()[..] {
            [0, ttl] if ttl >= -1 => ttl,
            _ => panic!("not refused, but {self:?}"),
        }
    }

    /// `position` of `[-1, position, seq, life]`: in the queue for a session.
    #[track_caller]
    pub fn queued(&self) -> i64 {
        match self.ints()[..] {
            [-1, position, _, life] if position >= 1 && life >= 1 => position,
            _ => panic!("not queued, but {self:?}"),
        }
    }

    /// The events of a reply to EVENTS: kind, key and owner of each as one text, and its value.
    /// Without the holds that the test itself has given back on a connection that is not bound.
    ///
    /// ```
    /// use rlock_tests::Reply;
    /// let [seq, life, token, db] = [1, 7, 12, 0].map(Reply::Int);
    /// let [kind, key, owner] = ["lost", "k", "bob"].map(Reply::from);
    /// let [value, mode] = ["expired", "plain"].map(Reply::from);
    /// let event = Reply::Array(vec![seq, kind, key, owner, value, token, mode, db]);
    /// let told = Reply::Array(vec![life, Reply::Array(vec![event])]).events();
    /// assert_eq!(told, [("lost k bob".to_owned(), Reply::from("expired"))]);
    /// ```
    #[track_caller]
    pub fn events(&self) -> Vec<(String, Self)> {
        let told = self.told().1.into_iter();
        let others = told.filter(|event| event.value != "released");
        others.map(|event| (event.what, event.value)).collect()
    }

    /// The life and the events of a reply to EVENTS.
    #[track_caller]
    pub fn told(&self) -> (i64, Vec<Event>) {
        let [life, events] = self.array() else {
            panic!("not told, but {self:?}");
        };
        let events = events.array().iter().map(|event| match event.array() {
            [seq, kind, key, owner, value, token, mode, db] => {
                let [kind, key, owner, mode] = [kind, key, owner, mode].map(Self::text);
                let [seq, token, db] = [seq, token, db].map(Self::int);
                Event {
                    seq,
                    what: format!("{kind} {key} {owner}"),
                    value: value.clone(),
                    token,
                    mode,
                    db,
                }
            }
            other => panic!("not an event, but {other:?}"),
        });
        (life.int(), events.collect())
    }

    /// The token of the one event `granted key owner`.
    #[track_caller]
    pub fn granted(&self, key: &str, owner: &str) -> i64 {
        let (event, value) = self.event();
        assert_eq!(event, format!("granted {key} {owner}"));
        let token = value.int();
        assert!(token >= 1, "{token} is no token");
        token
    }

    /// The one event there is.
    #[track_caller]
    pub fn event(&self) -> (String, Self) {
        let mut events = self.events();
        assert_eq!(events.len(), 1, "not one event, but {self:?}");
        events.remove(0)
    }

    /// The number.
    #[track_caller]
    pub fn int(&self) -> i64 {
        match self {
            Self::Int(number) => *number,
            other => panic!("not a number, but {other:?}"),
        }
    }

    /// The numbers of an array of numbers.
    #[track_caller]
    pub fn ints(&self) -> Vec<i64> {
        self.array().iter().map(Self::int).collect()
    }

    /// The items of an array (or of a set or push).
    #[track_caller]
    pub fn array(&self) -> &[Self] {
        match self {
            Self::Array(items) | Self::Set(items) | Self::Push(items) => items,
            other => panic!("not an array, but {other:?}"),
        }
    }

    /// The text of a bulk or simple string; bytes that are no UTF-8 are replaced.
    #[track_caller]
    pub fn text(&self) -> String {
        match self {
            Self::Bulk(text) | Self::Simple(text) => String::from_utf8_lossy(text).into_owned(),
            other => panic!("not a text, but {other:?}"),
        }
    }

    /// The texts of an array of texts.
    #[track_caller]
    pub fn texts(&self) -> Vec<String> {
        self.array().iter().map(Self::text).collect()
    }

    /// The text of an error.
    #[track_caller]
    pub fn error(&self) -> String {
        match self {
            Self::Error(text) => String::from_utf8_lossy(text).into_owned(),
            other => panic!("not an error, but {other:?}"),
        }
    }

    /// Whether the server refused the command itself.
    pub const fn is_error(&self) -> bool {
        matches!(self, Self::Error(_))
    }

    /// The value of a map under `key`; a flat array of RESP2 counts as a map.
    #[track_caller]
    pub fn get(&self, key: &str) -> &Self {
        self.pairs()
            .into_iter()
            .find(|(found, _)| *found == key)
            .unwrap_or_else(|| panic!("no {key} in {self:?}"))
            .1
    }

    /// The keys of a map, or of a flat array, in order.
    #[track_caller]
    pub fn keys(&self) -> Vec<String> {
        self.pairs()
            .into_iter()
            .map(|(key, _)| key.text())
            .collect()
    }

    #[track_caller]
    fn pairs(&self) -> Vec<(&Self, &Self)> {
        match self {
            Self::Map(pairs) => pairs.iter().map(|(key, value)| (key, value)).collect(),
            other => other
                .array()
                .chunks_exact(2)
                .map(|pair| (&pair[0], &pair[1]))
                .collect(),
        }
    }

    /// As `redis-cli` prints it on a terminal, without a line feed at the end.
    ///
    /// ```
    /// use rlock_tests::Reply;
    /// let reply = Reply::Array(vec![Reply::Int(1), Reply::Bulk(b"a\"b".to_vec())]);
    /// assert_eq!(reply.as_cli(), "1) (integer) 1\n2) \"a\\\"b\"");
    /// ```
    pub fn as_cli(&self) -> String {
        match self {
            Self::Int(number) => format!("(integer) {number}"),
            Self::Bulk(text) => format!("\"{}\"", cli_escape(text)),
            Self::Simple(text) => String::from_utf8_lossy(text).into_owned(),
            Self::Error(text) => format!("(error) {}", String::from_utf8_lossy(text)),
            Self::Null => "(nil)".to_owned(),
            Self::Double(number) => format!("(double) {number}"),
            Self::Bool(is) => format!("({is})"),
            Self::Array(items) | Self::Set(items) | Self::Push(items) => cli_list(items),
            Self::Map(_) => panic!("transcripts are in RESP2, where there are no maps"),
        }
    }
}

/// `1) …` and so on; what an item has below its first line is indented under it.
fn cli_list(items: &[Reply]) -> String {
    if items.is_empty() {
        return "(empty array)".to_owned();
    }
    let width = items.len().to_string().len();
    let indent = format!("\n{}", " ".repeat(width + 2));
    let numbered = items.iter().enumerate().map(|(index, item)| {
        format!(
            "{:>width$}) {}",
            index + 1,
            item.as_cli().replace('\n', &indent)
        )
    });
    numbered.collect::<Vec<_>>().join("\n")
}

fn cli_escape(text: &[u8]) -> String {
    text.iter()
        .map(|byte| match byte {
            b'"' => "\\\"".to_owned(),
            b'\'' => "'".to_owned(),
            other => other.escape_ascii().to_string(),
        })
        .collect()
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(number) => write!(f, "{number}"),
            Self::Bulk(text) => write!(f, "\"{}\"", text.escape_ascii()),
            Self::Simple(text) => write!(f, "+{}", text.escape_ascii()),
            Self::Error(text) => write!(f, "-{}", text.escape_ascii()),
            Self::Null => write!(f, "null"),
            Self::Double(number) => write!(f, "{number:?}"),
            Self::Bool(is) => write!(f, "{is}"),
            Self::Array(items) => f.debug_list().entries(items).finish(),
            Self::Set(items) => f.debug_set().entries(items).finish(),
            Self::Push(items) => {
                write!(f, ">").and_then(|()| f.debug_list().entries(items).finish())
            }
            Self::Map(pairs) => f
                .debug_map()
                .entries(pairs.iter().map(|(k, v)| (k, v)))
                .finish(),
        }
    }
}

impl From<i64> for Reply {
    fn from(number: i64) -> Self {
        Self::Int(number)
    }
}

impl From<&str> for Reply {
    fn from(text: &str) -> Self {
        Self::Bulk(text.into())
    }
}

impl PartialEq<i64> for Reply {
    fn eq(&self, other: &i64) -> bool {
        matches!(self, Self::Int(number) if number == other)
    }
}

impl PartialEq<str> for Reply {
    fn eq(&self, other: &str) -> bool {
        matches!(self, Self::Bulk(text) | Self::Simple(text) if text == other.as_bytes())
    }
}

impl PartialEq<&str> for Reply {
    fn eq(&self, other: &&str) -> bool {
        *self == **other
    }
}

impl PartialEq<String> for Reply {
    fn eq(&self, other: &String) -> bool {
        *self == **other
    }
}

/// A cursor over the bytes that have arrived. `None` everywhere: the rest has not come yet.
struct Input<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Input<'_> {
    fn reply(&mut self) -> Option<Reply> {
        let line = self.line()?;
        let (kind, rest) = line.split_first().expect("an empty line is no reply");
        Some(match kind {
            b':' => Reply::Int(number(rest)),
            b'+' => Reply::Simple(rest.to_vec()),
            b'-' => Reply::Error(rest.to_vec()),
            b'_' => Reply::Null,
            b',' => Reply::Double(text(rest).parse().expect("a double")),
            b'#' => Reply::Bool(rest == b"t"),
            b'$' | b'*' if rest == b"-1" => Reply::Null,
            b'$' => Reply::Bulk(self.payload(rest)?),
            // A verbatim string carries its format: `txt:` and then the text.
            b'=' => Reply::Bulk(self.payload(rest)?.split_off(4)),
            b'*' => Reply::Array(self.replies(number(rest))?),
            b'~' => Reply::Set(self.replies(number(rest))?),
            b'>' => Reply::Push(self.replies(number(rest))?),
            b'%' => {
                let flat = self.replies(number(rest) * 2)?;
                Reply::Map(
                    flat.chunks_exact(2)
                        .map(|p| (p[0].clone(), p[1].clone()))
                        .collect(),
                )
            }
            other => panic!(
                "a reply cannot begin with {:?}",
                other.escape_ascii().to_string()
            ),
        })
    }

    fn line(&mut self) -> Option<Vec<u8>> {
        let rest = &self.bytes[self.at..];
        let end = rest.windows(2).position(|two| two == b"\r\n")?;
        self.at += end + 2;
        Some(rest[..end].to_vec())
    }

    fn payload(&mut self, length: &[u8]) -> Option<Vec<u8>> {
        let length = usize::try_from(number(length)).expect("a length");
        let payload = self.bytes.get(self.at..self.at + length)?.to_vec();
        let end = self.bytes.get(self.at + length..self.at + length + 2)?;
        assert_eq!(end, b"\r\n", "a bulk string ends where its length says");
        self.at += length + 2;
        Some(payload)
    }

    fn replies(&mut self, count: i64) -> Option<Vec<Reply>> {
        (0..count).map(|_| self.reply()).collect()
    }
}

fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).expect("protocol text")
}

fn number(bytes: &[u8]) -> i64 {
    text(bytes).parse().expect("a number of the protocol")
}
