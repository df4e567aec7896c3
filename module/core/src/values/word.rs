//! Words of clients in error texts.

use std::fmt;

/// A client's word as an error text may show it: printable, and of limited length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word(String);

impl Word {
    const SHOWN_MAX: usize = 64;

    pub(crate) fn new(bytes: &[u8]) -> Self {
        let shown = bytes.get(..Self::SHOWN_MAX).unwrap_or(bytes);
        let mut text = shown.escape_ascii().to_string();
        if shown.len() < bytes.len() {
            text.push_str("...");
        }
        Self(text)
    }
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
