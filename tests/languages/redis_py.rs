//! The lock class for redis-py: its own tests, which speak of it in Python, each part of them on a
//! server of its own. They are in a module `python` so that the name of the language selects them.

mod python {
    use std::env;
    use std::path::Path;
    use std::process::Command;

    use rlock_tests::Server;

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
}
