//! RLOCK against real servers: one binary, a module an aspect. The names are the promises.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    reason = "a test that meets the unexpected should fail, and what it counts is small"
)]
#![allow(
    clippy::too_many_lines,
    clippy::many_single_char_names,
    clippy::similar_names,
    clippy::type_complexity,
    reason = "a test tells its story in one piece, and calls alice's connection a"
)]

// In the order in which to read them, by and large.
mod commands; // every reply and every error
mod declared; // COMMAND INFO, DOCS and GETKEYS, permissions, options, metrics
mod storage; // the hash of a lock, and hashes of others

mod freed; // locks that become free by other ways
mod mutual_exclusion; // never two holders, also when many holds end in one moment
mod queue; // plain locks

mod read_write; // readers together, writers alone
mod read_write_cluster; // slots on their way to another node
mod read_write_queue; // read-write locks
mod read_write_redisson; // beside what Redisson writes

mod permits; // a counting semaphore

mod several; // several locks at once
mod several_cluster; // and in a cluster

mod bind; // connections that were given up
mod deadlock; // waits that could never end
mod events; // what a session is told of
mod log; // what an operator is told of afterwards
mod sessions; // what ends with a connection
mod wanted; // what a holder is told of those who wait

mod clock; // a wall clock that is set
mod cluster_down; // a node of a cluster that refuses to write
mod data; // hashes that are no locks
mod denied; // a server that refuses to write
mod everybody; // holds and waits of every kind, to be carried through a failover
mod failover; // replicas that become primaries, by sentinels and by order
mod failover_cluster; // and in a cluster
mod grant_delay; // a server that grants nothing for a while after its start
mod guard; // commands that are run only under a lock
mod in_memory; // the server in memory answers as a real one
mod kill; // what a killed server has on its disk
mod renamed; // servers without some of their commands
mod replication; // replicas, AOF, RDB, messages, notifications
mod restore; // new locks as one command
mod several_replication; // the same of readers, writers and several locks at once

mod atomic_migration; // slots that move as a whole
mod attacks; // what was found by attacking the loop
mod hostile; // any bytes, any keyspace
mod load; // many clients that end at once, clients that never read, noise
mod memory; // what has ended keeps no memory
mod moved; // where waiters are sent whose slot has moved
mod noise; // any commands, while locks are in use
mod read_write_hostile; // read-write locks as others may have written them
mod several_hostile; // the largest waits for several locks
mod smoke; // a short set of all, also for valgrind
mod writer_tokens; // a writer's token, wherever its key goes

mod client; // the client crate
mod client_acknowledged; // grants that replicas have
mod client_acl; // what its user must be allowed
mod client_attacks; // what newer answers of the module may do to it
mod client_cluster; // every lock at its node
mod client_cluster_names; // nodes by several names
mod client_doubt;
mod client_faults; // what it says when processes and networks fail
mod client_former; // connections and servers that were given up
mod client_guard; // commands that are run only while its guard is held
mod client_keep; // locks that it keeps for their next use
mod client_late; // what arrives when nobody waits for it any more
mod client_leader; // leader election, with processes that are killed
mod client_moves; // slots that move while answers are lost or late
mod client_multi; // several locks at once
mod client_overlap; // single and several locks of a scope that overlap, when something goes wrong
mod client_owner; // what one owner's calls and guards do to each other
mod client_permits; // its semaphore
mod client_quorum; // its lock over several servers
mod client_quorum_faults; // the same where these are at odds
mod client_quorum_storm; // never two holders
mod client_races; // losses told with grants, several slots in time
mod client_rules; // one hold for each owner, and silences that cost nothing
mod client_rw; // its readers and writers
mod client_scope; // locks that are taken for one owner
mod client_seen; // what operators see of it
mod client_sentinel; // a server that is replaced by another
mod client_session; // its two connections
mod client_stale; // word of an earlier ACQUIRE
mod client_threads; // calls of one scope at once
mod client_tls; // its connections encrypted
mod client_unheard; // answers that never come
mod client_wanted; // what its guards hear of those who wait

mod back_out; // a server that goes on without the module
mod commands_doc; // docs/commands.md
mod errors_doc; // the errors in it
mod languages; // the programs in docs/languages.md
mod packaging; // what containers, Kubernetes and systemd read
mod readme; // the transcript in README.md
mod tidy;

mod harness; // the harness itself catches what it should catch
mod ways; // clients with one way for commands and another for the session
mod wires; // connections of a client in memory, for its tests
