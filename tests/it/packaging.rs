//! The files for packages, containers and the like, as far as they can be read without the programs
//! that they are for.

use std::fs;
use std::path::Path;
use std::process::Command;

use rlock_tests::{Builder, Conn, Server};

use super::tidy::read;

/// The lines of a file within a YAML file, from the line `name: |` on.
fn block(page: &str, name: &str) -> String {
    let begin = format!("  {name}: |\n");
    let rest = page.split(&begin).nth(1).expect("the block");
    let lines = rest.lines().take_while(|line| line.starts_with("    "));
    lines.map(str::trim_start).collect::<Vec<_>>().join("\n")
}

/// A server with these settings, but for those that say where it is.
fn with_settings(settings: &str) -> Builder {
    let settings = settings.lines().map(str::trim);
    let settings = settings.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let elsewhere = ["loadmodule ", "bind ", "port ", "dir ", "aclfile "];
    let settings = settings.filter(|line| !elsewhere.iter().any(|its| line.starts_with(its)));
    settings.fold(Server::builder(), Builder::config)
}

/// The instructions of a file for podman and docker, each as a word and the rest.
fn instructions(path: &str) -> Vec<(String, String)> {
    let page = read(path).replace("\\\n", " ");
    let lines = page.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let words = lines.map(|line| line.split_once(' ').expect("an instruction and what of"));
    words
        .map(|(word, rest)| (word.to_owned(), rest.to_owned()))
        .collect()
}

#[test]
#[expect(clippy::print_stderr, reason = "a test that was skipped says so")]
fn compose_and_kubernetes_files_name_only_what_they_have() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging");
    let python = |arguments: &[&str]| {
        let mut python = Command::new("python3");
        python.current_dir(&folder).args(arguments).output()
    };
    let has_yaml = python(&["-c", "import yaml"]).is_ok_and(|output| output.status.success());
    if !has_yaml {
        eprintln!("skipped: no Python with yaml here");
        return;
    }
    let output = python(&["check.py"]).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}

#[test]
fn containerfiles_have_known_instructions_and_stages() {
    for path in ["Containerfile", "Containerfile.module"] {
        let instructions = instructions(&format!("packaging/container/{path}"));
        let mut stages = Vec::new();
        for (word, rest) in &instructions {
            match word.as_str() {
                "ARG" | "USER" => assert!(!rest.contains(' '), "{path}: {rest}"),
                "FROM" => stages.extend(rest.split_once(" AS ").map(|(_, stage)| stage)),
                "RUN" => assert_shell_reads(rest),
                "CMD" => assert!(rest.starts_with("[\"") && rest.ends_with("\"]"), "{rest}"),
                "COPY" => {
                    let from = rest
                        .strip_prefix("--from=")
                        .map(|rest| rest.split(' ').next());
                    let is_known = |from: Option<&str>| stages.contains(&from.unwrap());
                    assert!(from.is_none_or(is_known), "{path}: {rest}");
                    assert!(
                        from.is_some() || rest.starts_with("rlock-module_*_"),
                        "{rest}"
                    );
                }
                _ => panic!("{path}: {word}"),
            }
        }
        let last = &instructions.last().unwrap().0;
        assert_eq!(last, "CMD", "{path}");
    }
}

#[track_caller]
fn assert_shell_reads(line: &str) {
    let output = Command::new("sh").args(["-nc", line]).output().unwrap();
    assert!(output.status.success(), "{line}");
}

#[test]
fn the_image_has_a_configuration_that_loads_the_module_and_listens_to_all() {
    let instructions = instructions("packaging/container/Containerfile");
    let edit = instructions
        .iter()
        .find(|(_, rest)| rest.starts_with("sed "));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("redis.conf");
    fs::write(&file, read("redis.conf")).unwrap();
    let edit = edit.expect("an edit").1.replace(
        " /etc/rlock/redis.conf",
        &format!(" {}", file.to_str().unwrap()),
    );
    let edited = Command::new("sh").args(["-c", &edit]).status().unwrap();
    assert!(edited.success());
    let (before, after) = (read("redis.conf"), fs::read_to_string(&file).unwrap());
    let changed: Vec<_> = before
        .lines()
        .zip(after.lines())
        .filter(|(before, after)| before != after)
        .map(|(_, after)| after)
        .collect();
    let wanted = ["loadmodule /usr/lib/rlock/librlock.so", "bind * -::*"];
    assert_eq!(changed, wanted);
    let server = with_settings(&after).start();
    assert_eq!(
        server.run("CONFIG GET appendonly").texts(),
        ["appendonly", "yes"]
    );
    server.connect().take("k", "alice");
}

/// A server as the Kubernetes example has it, which the harness enters as its operator. The file of
/// users lies in this folder.
fn of_kubernetes(folder: &Path) -> Builder {
    let page = read("packaging/kubernetes/redis.yaml");
    let file = folder.join("users.acl");
    fs::write(&file, block(&page, "users.acl") + "\n").unwrap();
    with_settings(&block(&page, "redis.conf"))
        .config(&format!("aclfile {}", file.display()))
        .user("operator", "change-me")
}

/// A server with the settings of `redis.conf`, and with all its users, who are comments there.
fn of_the_file() -> Builder {
    let file = read("redis.conf");
    let users = file.lines().filter(|line| line.starts_with("# user "));
    let users = users.map(|line| line.trim_start_matches("# "));
    users
        .fold(with_settings(&file), Builder::config)
        .config("user harness on >secret ~* &* +@all")
        .user("harness", "secret")
}

#[track_caller]
fn refuses_who_gives_no_name(server: &Server) {
    let mut nobody = Conn::open(server.address()).unwrap();
    let error = nobody.run("RLOCK.ACQUIRE k nobody 1000").error();
    assert!(error.starts_with("NOAUTH"), "{error}");
    assert!(nobody.run("AUTH default any").is_error());
}

#[test]
fn the_kubernetes_example_has_a_configuration_and_users_that_a_server_takes() {
    let folder = tempfile::tempdir().unwrap();
    let server = of_kubernetes(folder.path()).start();
    let policy = server.run("CONFIG GET maxmemory-policy");
    assert_eq!(policy.texts(), ["maxmemory-policy", "noeviction"]);
    let mut conn = server.connect();
    assert_eq!(conn.run("AUTH probe any"), "OK");
    assert_eq!(conn.run("PING"), "PONG");
    assert!(conn.run("RLOCK.ACQUIRE k probe 1000").is_error());
    server.connect().take("k", "alice");
    refuses_who_gives_no_name(&server);
}

/// Many servers load the append-only file with the rights of the user `default`.
#[test]
fn held_locks_survive_a_restart_with_the_users_that_are_shipped() {
    let folder = tempfile::tempdir().unwrap();
    for how in [of_kubernetes(folder.path()), of_the_file()] {
        let mut server = how.start();
        refuses_who_gives_no_name(&server);
        let mut conn = server.connect();
        conn.run("RLOCK.ACQUIRE plain alice 600000").held();
        conn.run("RLOCK.ACQUIRE read alice 600000 READ").held();
        conn.run("RLOCK.ACQUIRE write alice 600000 WRITE").held();
        conn.run("RLOCK.ACQUIRE permits alice 600000 PERMITS 2 OF 3")
            .held();
        conn.run("RLOCK.MACQUIRE alice 600000 2 one other").held();
        conn.take("handed-over", "bob");
        let mut waiting = server.blocked_in("RLOCK.ACQUIRE handed-over alice 600000 BLOCK 0");
        conn.let_go("handed-over", "bob");
        waiting.read().held();
        server.restart();
        let mut conn = server.connect();
        for (name, mode) in [
            ("plain", ""),
            ("read", "READ"),
            ("write", "WRITE"),
            ("permits", "PERMITS"),
            ("one", ""),
            ("other", ""),
            ("handed-over", ""),
        ] {
            let renewed = conn.run(format!("RLOCK.RENEW {name} alice 600000 {mode}"));
            assert_eq!(renewed, 1, "{name} is lost\n{}", server.log());
        }
        refuses_who_gives_no_name(&server);
    }
}

#[test]
fn systemd_finds_nothing_wrong_with_the_units() {
    // Where a server is here, and where modules have to be.
    let unit = read("packaging/systemd/redis-rlock.service");
    assert!(
        unit.contains("\nExecPaths=/usr/bin/redis-server /usr/lib /lib\n"),
        "{unit}"
    );
    is_a_unit("redis-rlock.service", "/usr/bin/redis-server");
    is_a_unit("rlock-exporter.service", "/usr/bin/rlock");
}

#[expect(clippy::print_stderr, reason = "a test that was skipped says so")]
fn is_a_unit(name: &str, program: &str) {
    let unit = read(&format!("packaging/systemd/{name}"));
    let start = format!("ExecStart={program} ");
    assert!(unit.contains(&start), "{unit}");
    let unit = unit.replace(&start, "ExecStart=/bin/true ");
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join(name);
    fs::write(&file, unit).unwrap();
    let mut verify = Command::new("systemd-analyze");
    let Ok(output) = verify.args(["verify", "--man=no"]).arg(file).output() else {
        eprintln!("skipped: no systemd-analyze here");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !said.contains(name), "{said}");
}
