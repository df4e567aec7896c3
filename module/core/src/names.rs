//! The names that belong to a lock's name, as Redisson forms them: other keys, and channels.
//!
//! A lock's name in braces makes the server put what belongs to it into the lock's slot of a
//! cluster. A name that has a brace already is taken as it is, which is Redisson's rule, with its
//! trap: `a{b` has a brace but no tag.

/// The channel of a plain lock's unlock message.
pub fn lock_channel(name: &[u8]) -> Vec<u8> {
    with_tag(b"redisson_lock__channel:", name, &[])
}

/// The channel of a read-write lock's unlock message.
pub fn read_write_channel(name: &[u8]) -> Vec<u8> {
    with_tag(b"redisson_rwlock:", name, &[])
}

/// The queue of Redisson's fair lock of this name: a list of those who wait.
pub fn fair_queue(name: &[u8]) -> Vec<u8> {
    with_tag(b"redisson_lock_queue:", name, &[])
}

/// Until when those who wait for Redisson's fair lock are taken to be alive: a sorted set.
pub fn fair_timeouts(name: &[u8]) -> Vec<u8> {
    with_tag(b"redisson_lock_timeout:", name, &[])
}

/// The channel on which one who waits for Redisson's fair lock listens.
pub fn fair_channel(name: &[u8], waiter: &[u8]) -> Vec<u8> {
    with_tag(b"redisson_lock__channel:", name, &[b":", waiter])
}

/// A reader's timeout key with this number.
pub fn timeout_key(name: &[u8], owner: &[u8], number: i64) -> Vec<u8> {
    let number = number.to_string();
    with_tag(
        &[],
        name,
        &[b":", owner, b":rwlock_timeout:", number.as_bytes()],
    )
}

/// Whether the timeout keys of a lock's readers are in the lock's slot of a cluster, whoever the
/// readers are.
pub fn timeouts_share_slot(name: &[u8]) -> bool {
    let mut after_brace = name.splitn(2, |byte| *byte == b'{').skip(1);
    match after_brace.next() {
        // Its own tag is the slot of both, if it is one: braces with something between.
        Some(rest) => rest
            .iter()
            .position(|byte| *byte == b'}')
            .is_some_and(|at| at > 0),
        // The braces that are put around it hold all of it.
        None => !name.is_empty() && !name.contains(&b'}'),
    }
}

fn with_tag(prefix: &[u8], name: &[u8], suffix: &[&[u8]]) -> Vec<u8> {
    let braces = !name.contains(&b'{');
    let suffix_len: usize = suffix.iter().map(|part| part.len()).sum();
    let lens = [prefix.len(), name.len(), suffix_len, 2];
    let mut whole = Vec::with_capacity(lens.iter().sum());
    whole.extend_from_slice(prefix);
    if braces {
        whole.push(b'{');
    }
    whole.extend_from_slice(name);
    if braces {
        whole.push(b'}');
    }
    for part in suffix {
        whole.extend_from_slice(part);
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_braces_gets_them() {
        assert_eq!(lock_channel(b"k"), b"redisson_lock__channel:{k}");
        assert_eq!(read_write_channel(b"k"), b"redisson_rwlock:{k}");
        assert_eq!(timeout_key(b"k", b"o:1", 2), b"{k}:o:1:rwlock_timeout:2");
        assert_eq!(
            fair_channel(b"k", b"o:1"),
            b"redisson_lock__channel:{k}:o:1"
        );
    }

    #[test]
    fn a_name_with_a_brace_is_taken_as_it_is() {
        assert_eq!(lock_channel(b"a:{b}"), b"redisson_lock__channel:a:{b}");
        assert_eq!(timeout_key(b"a{b", b"o", 1), b"a{b:o:rwlock_timeout:1");
    }

    #[test]
    fn braces_that_are_no_tag_put_timeout_keys_elsewhere() {
        for name in [&b"k"[..], b"{a}b", b"a:{b}", b"}a{b}", b"{{}"] {
            assert!(timeouts_share_slot(name), "{}", name.escape_ascii());
        }
        for name in [&b"a{b"[..], b"{}x", b"a}b", b"", b"}{", b"{"] {
            assert!(!timeouts_share_slot(name), "{}", name.escape_ascii());
        }
    }
}
