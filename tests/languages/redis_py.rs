//! The package for Python, `client/python`: its own tests, in Python, which start their servers,
//! and `RedBeat` with its lock. They are in a module `python` so that the name of the language
//! selects them.

mod python {
    use std::env;
    use std::path::Path;
    use std::process::Command;

    use rlock_tests::{Server, module_path};

    /// Runs a module of Python. Its output is shown, and its results if it fails.
    #[track_caller]
    fn passes(words: &[&str]) {
        let server = Server::start();
        let programs = env::var("RLOCK_PROGRAMS");
        let programs = programs.expect("RLOCK_PROGRAMS: start these tests by `make languages`");
        let folder = Path::new(&programs).join("python");
        let output = Command::new(folder.join("venv/bin/python"))
            .arg("-m")
            .args(words)
            .current_dir(folder)
            .env("REDIS_URL", format!("redis://{}", server.address()))
            .env("RLOCK_MODULE", module_path()) // for the servers that a test itself starts
            .output()
            .expect("python");
        let printed = String::from_utf8_lossy(&output.stdout);
        let results = String::from_utf8_lossy(&output.stderr);
        print!("{printed}"); // figures
        assert!(
            output.status.success(),
            "{words:?} failed:\n{printed}\n{results}"
        );
    }

    /// Runs a file of the package's tests against the wheel that was installed.
    #[track_caller]
    fn package_passes(file: &str, only: &str) {
        let file = format!("package/tests/{file}");
        passes(&["pytest", "-q", "--durations=5", "-k", only, &file]);
    }

    #[test]
    fn redbeat_schedules_again_within_the_lease_after_a_beat_was_killed() {
        passes(&["unittest", "-v", "test_beat.ABeatIsKilled"]);
    }

    #[test]
    fn the_first_example_runs() {
        passes(&["first"]);
    }

    #[test]
    fn the_package_decides_by_the_five_rules() {
        package_passes("test_core.py", "");
    }

    #[test]
    fn the_package_lives_with_small_pools_forks_and_few_rights() {
        package_passes("test_package.py", "");
    }

    #[test]
    fn the_package_outlasts_cuts_freezes_and_restarts() {
        package_passes("test_client.py", "");
    }

    #[test]
    fn the_package_keeps_what_redis_py_documents_of_its_locks() {
        package_passes("test_redis_lock.py", "not Async");
    }

    #[test]
    fn the_package_keeps_what_redis_py_documents_of_its_asyncio_locks() {
        package_passes("test_redis_lock.py", "Async");
    }
}
