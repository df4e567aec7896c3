//! Names that are formed from a lock's name as Redisson forms them: other keys, and channels.
//!
//! They contain the lock's name in braces, so that a cluster puts these keys into the lock's slot.
//! A name that contains a brace already is used as it is. This is Redisson's rule, and it has a
//! trap: `a{b` has a brace but no hash tag.

use crate::values::number::Text;

/// The prefix of the names of all our commands.
pub const OWN_PREFIX: &[u8] = b"rlock.";
/// The field of a lock's hash that holds the fencing token.
pub const FENCE_FIELD: &[u8] = b"fence";
/// The field that marks a hash as a read-write lock, or as permits.
pub const MODE_FIELD: &[u8] = b"mode";
/// The suffix that follows the owner in the field of a writer.
pub const WRITER_SUFFIX: &[u8] = b":write";
/// The value of the mode field of permits.
pub const PERMITS_MODE: &[u8] = b"permits";

/// A name in parts that must be concatenated.
pub type Parts<'a> = [&'a [u8]; 4];

/// A lock's name as it appears in other names: in braces, unless it contains a brace already.
#[derive(Clone, Copy, Debug)]
pub struct Tagged<'a>([&'a [u8]; 3]);

/// Prepares a lock's name for use in other names.
pub fn tagged(name: &[u8]) -> Tagged<'_> {
    if name.contains(&b'{') {
        Tagged([b"", name, b""])
    } else {
        Tagged([b"{", name, b"}"])
    }
}

impl<'a> Tagged<'a> {
    /// The channel of a plain lock's unlock message.
    pub fn lock_channel(self) -> Parts<'a> {
        self.after(b"redisson_lock__channel:")
    }

    /// The channel of a read-write lock's unlock message.
    pub fn read_write_channel(self) -> Parts<'a> {
        self.after(b"redisson_rwlock:")
    }

    /// The queue of Redisson's fair lock of this name: a list of its waiters.
    pub fn fair_queue(self) -> Parts<'a> {
        self.after(b"redisson_lock_queue:")
    }

    /// A sorted set of Redisson's fair lock: until when each waiter counts as alive.
    pub fn fair_timeouts(self) -> Parts<'a> {
        self.after(b"redisson_lock_timeout:")
    }

    /// The channel on which a waiter for Redisson's fair lock listens.
    pub fn fair_channel(self, waiter: &[u8]) -> Vec<u8> {
        [&self.lock_channel().concat(), &b":"[..], waiter].concat()
    }

    fn after(self, prefix: &'a [u8]) -> Parts<'a> {
        let [open, name, close] = self.0;
        [prefix, open, name, close]
    }
}

/// A reader's timeout key with this number.
pub fn timeout_key(name: &[u8], owner: &[u8], number: i64) -> Vec<u8> {
    timeout_key_parts(name, owner, &Text::number(number)).concat()
}

/// The parts of that key, which must be concatenated.
pub fn timeout_key_parts<'a>(name: &'a [u8], owner: &'a [u8], number: &'a Text) -> [&'a [u8]; 7] {
    let Tagged([open, name, close]) = tagged(name);
    let suffix = b":rwlock_timeout:";
    [open, name, close, b":", owner, suffix, number.bytes()]
}

/// The key that stores the limit of permits.
pub fn limit_key(name: &[u8]) -> Vec<u8> {
    let Tagged([open, name, close]) = tagged(name);
    [open, name, close, b":rlock_limit"].concat()
}

/// The field of an owner that holds the lock as its writer.
pub fn writer_field(owner: &[u8]) -> Vec<u8> {
    [owner, WRITER_SUFFIX].concat()
}

/// Whether the keys beside a lock's own key are in the same slot of a cluster: the timeout keys of
/// its readers, for any owner, and the key of its limit.
pub fn side_keys_share_slot(name: &[u8]) -> bool {
    let mut after_brace = name.splitn(2, |byte| *byte == b'{').skip(1);
    match after_brace.next() {
        // The name has a brace, so none are added. If it has a hash tag (braces with text between
        // them), the tag decides the slot of all these keys.
        Some(rest) => rest.iter().position(|byte| *byte == b'}') > Some(0),
        // Braces are added around the name. The hash tag is then the whole name, unless the name is
        // empty, or a `}` in it ends the tag early.
        None => !name.is_empty() && !name.contains(&b'}'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_braces_gets_them() {
        let name = tagged(b"k");
        assert_eq!(name.lock_channel().concat(), b"redisson_lock__channel:{k}");
        assert_eq!(name.read_write_channel().concat(), b"redisson_rwlock:{k}");
        assert_eq!(timeout_key(b"k", b"o:1", 2), b"{k}:o:1:rwlock_timeout:2");
        assert_eq!(limit_key(b"k"), b"{k}:rlock_limit");
        assert_eq!(name.fair_channel(b"o:1"), b"redisson_lock__channel:{k}:o:1");
        assert_eq!(name.fair_queue().concat(), b"redisson_lock_queue:{k}");
        assert_eq!(name.fair_timeouts().concat(), b"redisson_lock_timeout:{k}");
    }

    #[test]
    fn a_name_with_a_brace_is_taken_as_it_is() {
        assert_eq!(
            tagged(b"a:{b}").lock_channel().concat(),
            b"redisson_lock__channel:a:{b}"
        );
        assert_eq!(timeout_key(b"a{b", b"o", 1), b"a{b:o:rwlock_timeout:1");
    }

    #[test]
    fn braces_that_are_no_tag_put_side_keys_elsewhere() {
        for name in [&b"k"[..], b"{a}b", b"a:{b}", b"}a{b}", b"{{}"] {
            assert!(side_keys_share_slot(name), "{}", name.escape_ascii());
        }
        for name in [&b"a{b"[..], b"{}x", b"a}b", b"", b"}{", b"{"] {
            assert!(!side_keys_share_slot(name), "{}", name.escape_ascii());
        }
    }
}
