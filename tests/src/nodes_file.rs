//! The `nodes.conf` of a cluster's node: its memory of the others.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// Gives each replica in the file the shard of its primary.
///
/// While a cluster is young a node may remember another shard for a replica than for its primary,
/// and a server such as Valkey 8.1.1 does not start with such a file (valkey-io/valkey#2171).
pub(crate) fn agree_on_shards(file: &Path) {
    // None is there before a node has met another.
    if let Ok(text) = fs::read_to_string(file) {
        fs::write(file, with_shards_of_primaries(&text)).expect("a file");
    }
}

fn with_shards_of_primaries(text: &str) -> String {
    let mut shards = HashMap::new();
    for line in text.lines() {
        let id = line.split(' ').next().expect("a word, or an empty one");
        shards.extend(shard_of(line).map(|shard| (id, shard)));
    }
    let mended = text.lines().map(|line| {
        let of_primary = line.split(' ').nth(3).and_then(|id| shards.get(id));
        match (shard_of(line), of_primary) {
            (Some(own), Some(shard)) => line.replacen(own, shard, 1) + "\n",
            _ => line.to_owned() + "\n",
        }
    });
    mended.collect()
}

/// Among the things that are told with a node's address.
fn shard_of(line: &str) -> Option<&str> {
    let told = line.split(' ').nth(1)?;
    let mut told = told.split(',');
    told.find_map(|one| one.strip_prefix("shard-id="))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_have_the_shard_of_their_primary() {
        let file = |shard: &str| {
            format!(
                "a1 127.0.0.1:1@2,,tls-port=0,shard-id=s1 master - 0 0 1 connected 0-5460\n\
                 b1 127.0.0.1:3@4,,tls-port=0,shard-id={shard} myself,slave a1 0 0 1 connected\n\
                 c1 127.0.0.1:5@6,,tls-port=0,shard-id=s2 master - 0 0 3 connected\n\
                 d1 127.0.0.1:7@8 slave gone 0 0 3 disconnected\n\
                 vars currentEpoch 3 lastVoteEpoch 0\n"
            )
        };
        assert_eq!(with_shards_of_primaries(&file("s9")), file("s1"));
        assert_eq!(with_shards_of_primaries(&file("s1")), file("s1"));
    }
}
