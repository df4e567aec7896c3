//! docs/languages.md shows the programs in tests/languages as they are; `make languages` runs them.

use super::tidy::read;

/// How the programs are marked in the document, and the files of each, in order.
const PROGRAMS: [(&str, &[&str]); 4] = [
    (
        "python",
        &["python/first.py", "python/take.py", "python/beat.py"],
    ),
    (
        "js",
        &["node/lock.mjs", "ioredis/lock.mjs", "node/take.mjs"],
    ),
    ("go", &["go/lock.go", "go/main.go"]),
    ("java", &["java/Lock.java", "java/Take.java"]),
];

fn file(path: &str) -> String {
    read(&format!("tests/languages/{path}"))
}

#[test]
fn the_document_shows_each_program_as_it_is() {
    let document = read("docs/languages.md");
    for (mark, files) in PROGRAMS {
        let fence = format!("\n```{mark}\n");
        let blocks = document.split(&fence).skip(1);
        let shown: Vec<_> = blocks
            .filter_map(|block| block.split("```\n").next())
            .collect();
        let files_now: Vec<_> = files.iter().map(|path| file(path)).collect();
        assert_eq!(shown, files_now, "{mark}");
        for path in files {
            assert!(
                document.contains(&format!("../tests/languages/{path}")),
                "{path}"
            );
        }
    }
}

#[test]
fn the_versions_it_speaks_of_are_those_that_are_tested() {
    let document = read("docs/languages.md");
    for (said, pinned, path) in [
        ("redis-py 8 ", "redis==8.", "python/requirements.txt"),
        ("RedBeat 2 ", "redbeat==2.", "python/requirements.txt"),
        ("node-redis 6 ", "\"redis\": \"6.", "node/package.json"),
        ("ioredis 6 ", "\"ioredis\": \"6.", "ioredis/package.json"),
        ("go-redis 9 ", "redis/go-redis/v9 v9.", "go/go.mod"),
        ("Jedis 8 ", "<version>8.", "java/pom.xml"),
    ] {
        assert!(document.contains(said), "{said}");
        assert!(
            file(path).contains(pinned),
            "{path} pins another major version than {said}"
        );
    }
}
