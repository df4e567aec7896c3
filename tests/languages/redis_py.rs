//! The lock class for redis-py, and the complete client: their own tests, in Python, each part of
//! them on a server of its own. They are in a module `python` so that the name of the language
//! selects them.

mod python {
    use std::env;
    use std::path::Path;
    use std::process::Command;

    use rlock_tests::{Server, module_path};

    /// Runs a test class, `file.Class`. What it prints is shown, and its results if it fails.
    #[track_caller]
    fn passes(class: &str) {
        let server = Server::start();
        let programs = env::var("RLOCK_PROGRAMS");
        let programs = programs.expect("RLOCK_PROGRAMS: start these tests by `make languages`");
        let folder = Path::new(&programs).join("python");
        let output = Command::new(folder.join("venv/bin/python"))
            .args(["-m", "unittest", "-v", class])
            .current_dir(folder)
            .env("REDIS_URL", format!("redis://{}", server.address()))
            .env("RLOCK_MODULE", module_path()) // for the servers that a test itself starts
            .output()
            .expect("python");
        let printed = String::from_utf8_lossy(&output.stdout);
        let results = String::from_utf8_lossy(&output.stderr);
        print!("{printed}"); // figures
        assert!(output.status.success(), "{class} failed:\n{results}");
    }

    #[test]
    fn what_redis_py_documents_is_true_of_its_own_lock() {
        passes("test_lock.RedisPy");
    }

    #[test]
    fn what_redis_py_documents_is_true_of_its_own_asyncio_lock() {
        passes("test_lock.RedisPyAsync");
    }

    #[test]
    fn it_is_true_of_our_lock_which_waits_in_a_queue_and_tells_of_losses() {
        passes("test_lock.OurLock");
    }

    #[test]
    fn it_is_true_of_our_asyncio_lock_which_does_so_too() {
        passes("test_lock.OurAsyncLock");
    }

    #[test]
    fn redbeat_schedules_again_within_the_lease_after_a_beat_was_killed() {
        passes("test_beat.ABeatIsKilled");
    }

    #[test]
    fn the_complete_client_excludes_waits_renews_and_tells_of_losses() {
        passes("test_rlock.Calm");
    }

    #[test]
    fn the_complete_client_outlasts_connections_that_are_killed() {
        passes("test_rlock.Cut");
    }

    #[test]
    fn the_complete_client_outlasts_a_restart_with_the_data() {
        passes("test_rlock.Restart");
    }

    #[test]
    fn the_complete_client_hears_of_a_restart_without_the_data() {
        passes("test_rlock.EmptyRestart");
    }

    #[test]
    fn the_complete_client_outlasts_a_frozen_server() {
        passes("test_rlock.Freeze");
    }

    #[test]
    fn the_complete_client_outlasts_replies_that_are_held_back() {
        passes("test_rlock.HalfOpen");
    }
}
