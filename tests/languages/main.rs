//! The programs of docs/languages.md, one in each language, on a real server. `make languages` runs
//! these for every language that the machine has; the names are the promises.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::print_stdout,
    reason = "a test that meets the unexpected should fail, and what it counts is small"
)]

mod program; // one of the programs, running
mod promises; // what each of them does
mod redis_py; // the package for Python

/// A module a language, so that its name selects the tests: `python::`.
macro_rules! each_promise_in {
    ($($language:ident)*) => {
        $(mod $language {
            const LANGUAGE: &str = stringify!($language);

            #[test]
            fn it_waits_is_handed_the_lock_renews_it_and_releases_it() {
                super::promises::hand_over(LANGUAGE);
            }

            #[test]
            fn a_wait_longer_than_the_timeouts_of_the_library_stays_one_wait() {
                super::promises::patience(LANGUAGE);
            }

            #[test]
            fn a_lost_reply_does_not_count_twice() {
                super::promises::once(LANGUAGE);
            }

            #[test]
            fn a_lost_lock_ends_its_work() {
                super::promises::loss(LANGUAGE);
            }

            #[test]
            fn the_store_refuses_it_after_a_larger_token() {
                super::promises::fence(LANGUAGE);
            }

            #[test]
            fn it_reports_a_wait_that_could_never_end() {
                super::promises::deadlock(LANGUAGE);
            }

            #[test]
            fn it_reports_that_a_replica_grants_nothing() {
                super::promises::replica(LANGUAGE);
            }
        })*
    };
}

each_promise_in! { python node ioredis go java }

// Its name selects it together with `go::`.
mod also_go {
    #[test]
    fn a_wait_whose_context_is_cancelled_leaves_the_queue() {
        super::promises::cancelled_wait("go");
    }
}
