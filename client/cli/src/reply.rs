//! Replies of a server as JSON, and as lines on a terminal.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;

use redis::Value;
use serde_json::{Map, Value as Json};

use crate::exit::Failure;

/// The same in JSON, where bytes are [words].
pub(crate) fn json(value: &Value) -> Json {
    match value {
        Value::Int(number) => Json::from(*number),
        Value::Double(number) => Json::from(*number),
        Value::Boolean(yes) => Json::from(*yes),
        Value::BulkString(bytes) => Json::from(words(bytes)),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Json::from(text.clone()),
        Value::Okay => Json::from("OK"),
        Value::Array(values) | Value::Set(values) => values.iter().map(json).collect(),
        Value::Map(pairs) => {
            let pairs = pairs
                .iter()
                .map(|(key, value)| (text(&json(key)), json(value)));
            Json::Object(pairs.collect::<Map<_, _>>())
        }
        _ => Json::Null,
    }
}

/// Bytes as text. A name may have any bytes: those that are not UTF-8 are shown one by one, as
/// `\xff`. A backslash stands for itself, so that a name with one can be copied: a name with the
/// four characters `\xff` is shown in the same way as one with that byte.
pub(crate) fn words(bytes: &[u8]) -> String {
    let mut words = String::new();
    for chunk in bytes.utf8_chunks() {
        words.push_str(chunk.valid());
        words.extend(chunk.invalid().escape_ascii().map(char::from));
    }
    words
}

/// A name from the command line, as [words].
pub(crate) fn given(name: &OsStr) -> String {
    words(name.as_bytes())
}

/// Names from the command line, as they are shown.
pub(crate) fn shown_names(names: &[OsString]) -> String {
    let names = names.iter().map(|name| shown(&given(name)));
    names.collect::<Vec<_>>().join(", ")
}

/// Text that is safe for a terminal. Only characters that would steer it are escaped: control
/// characters, ends of lines, and marks that change the direction of writing.
pub(crate) fn shown(text: &str) -> String {
    let mut shown = String::new();
    for char in text.chars() {
        match char {
            '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                shown.extend(char.escape_unicode());
            }
            char if char.is_control() => shown.extend(char.escape_default()),
            char => shown.push(char),
        }
    }
    shown
}

/// A value as it is shown: text without quotes, `-` for null.
pub(crate) fn text(value: &Json) -> String {
    match value {
        Json::String(text) => shown(text),
        Json::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

/// A field as a number; 0 if it is missing.
pub(crate) fn number(of: &Json, field: &str) -> i64 {
    of.get(field).and_then(Json::as_i64).unwrap_or_default()
}

/// A field as text; None if it is missing.
pub(crate) fn field<'a>(of: &'a Json, name: &str) -> Option<&'a str> {
    of.get(name).and_then(Json::as_str)
}

pub(crate) fn list<'a>(of: &'a Json, field: &str) -> &'a [Json] {
    of.get(field)
        .and_then(Json::as_array)
        .map_or(&[], Vec::as_slice)
}

/// Milliseconds as a person reads them.
pub(crate) fn time(ms: &Json) -> String {
    let Some(ms) = ms.as_i64() else {
        return "-".to_owned();
    };
    let (seconds, part) = (ms / 1_000, (ms % 1_000) / 100);
    match seconds {
        _ if ms < 0 => "no limit".to_owned(),
        0 => format!("{ms}ms"),
        1..=59 => format!("{seconds}.{part}s"),
        60..=3_599 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3_600..=86_399 => format!("{}h{:02}m", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

/// One line on standard output. A reader that has gone ends the program without a word.
pub(crate) fn say(line: impl AsRef<str>) -> Result<(), Failure> {
    let written = writeln!(io::stdout(), "{}", line.as_ref());
    written.map_err(|error| cannot_write(&error))
}

/// The failure to report when standard output cannot be written.
pub(crate) fn cannot_write(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::silent(crate::exit::of_signal(13)),
        _ => Failure::unavailable(format!("cannot write: {error}")),
    }
}

/// As JSON, in one piece.
pub(crate) fn say_json(value: &Json) -> Result<(), Failure> {
    say(format!("{value:#}"))
}

/// Columns under their names, each as wide as its widest cell.
pub(crate) fn say_table(heads: &[&str], rows: &[Vec<String>]) -> Result<(), Failure> {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        let cells = cells.map(|cell| cell.chars().count());
        let head = heads.get(column).map_or(0, |head| head.len());
        cells.max().unwrap_or_default().max(head)
    };
    let widths: Vec<_> = (0..heads.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let cells = cells.zip(&widths);
        let padded: Vec<_> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        padded.join("  ").trim_end().to_owned()
    };
    say(line(&mut heads.iter().copied()))?;
    for row in rows {
        say(line(&mut row.iter().map(String::as_str)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_text_are_told_one_by_one() {
        assert_eq!(words("schön".as_bytes()), "schön");
        assert_eq!(words(b"a\xff\xfeb\xc3"), r"a\xff\xfeb\xc3");
    }

    #[test]
    fn only_what_would_steer_the_terminal_is_escaped() {
        for (text, expected) in [
            (
                r#"the 'hold' of "a" \ schön 鍵"#,
                r#"the 'hold' of "a" \ schön 鍵"#,
            ),
            ("a\u{1b}[2Jb\r\nc\u{7f}", r"a\u{1b}[2Jb\r\nc\u{7f}"),
            (
                "\u{9b}2J\u{202e}txt\u{2028}",
                r"\u{9b}2J\u{202e}txt\u{2028}",
            ),
        ] {
            assert_eq!(shown(text), expected);
        }
    }

    #[test]
    fn times_are_read_at_a_glance() {
        for (ms, shown) in [
            (-1, "no limit"),
            (17, "17ms"),
            (1_750, "1.7s"),
            (61_000, "1m01s"),
            (3_660_000, "1h01m"),
            (90_000_000, "1d01h"),
        ] {
            assert_eq!(time(&Json::from(ms)), shown);
        }
        assert_eq!(time(&Json::Null), "-");
    }
}
