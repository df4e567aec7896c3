//! The client as a user of the server's ACL.

use std::time::Duration;

use rlock_client::{Client, Error, ErrorKind, QuorumClient};
use rlock_tests::{Builder, Sentinels, Server, Version, in_sync, until};

use super::client::{calm, see_in_queue, soon, wait_in_queue};

/// The documented rights, for servers without the category.
const COMMANDS: &str = "+rlock.acquire +rlock.release +rlock.renew +rlock.cancel +rlock.events \
                        +rlock.bind +rlock.macquire";

/// And for those that have it.
const CATEGORY: &str = "+@lock -rlock.break -rlock.limit -rlock.sessions -rlock.log";

/// The further commands on each new connection.
fn introductions() -> &'static str {
    if Version::at_hand().at_least((7, 2), (7, 2)) {
        "+client|setinfo"
    } else {
        ""
    }
}

/// Makes a user `clerk` with these rights, beside nothing.
fn clerk(server: &Server, rights: &str) {
    let told = server.run(format!("ACL SETUSER clerk reset on >secret {rights}"));
    assert_eq!(told, "OK", "{rights}");
}

/// One with all that a client needs on `orders:*`.
fn able_clerk(server: &Server) {
    clerk(server, &format!("~orders:* {COMMANDS} {}", introductions()));
}

fn url(server: &Server) -> String {
    format!("redis://clerk:secret@{}", server.address())
}

async fn connect(server: &Server) -> Result<Client, Error> {
    soon(calm().connect(&url(server))).await
}

/// Whom the server has denied what.
fn denied(server: &Server) -> Vec<String> {
    let log = server.run("ACL LOG");
    let entries = log.array().iter();
    let said = entries.map(|entry| {
        let what = entry.get("object").text();
        format!("{} of {}", what, entry.get("username").text())
    });
    said.collect()
}

/// All that a client does, from connecting to being killed and coming back.
async fn everything(server: &Server, client: Client) {
    let guard = client.lock("orders:1").lock().await.unwrap();
    let waiting = wait_in_queue(server, &client, "orders:1");
    guard.renew().await.unwrap();
    server.connect().run("CLIENT KILL TYPE normal SKIPME yes");
    until("it waits again", || {
        server.waiting_owners("orders:1").len() == 1
    });
    soon(guard.unlock()).await.unwrap();
    soon(waiting)
        .await
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();

    let prices = client.rw_lock("orders:2");
    let writer = prices.write().await.unwrap();
    let reader = writer.downgrade().await.unwrap();
    reader.unlock().await.unwrap();
    let both = client.multi(["orders:3", "orders:4"]);
    let guard = both.lock().await.unwrap();
    guard.renew().await.unwrap();
    let second = both.clone();
    let waiting = see_in_queue(server, "orders:3", async move { second.lock().await });
    waiting.abort();
    until("the one that gave up has left", || {
        server.waiting_owners("orders:3").is_empty()
    });
    guard.unlock().await.unwrap();
    let exports = client.semaphore("orders:5", 3);
    let permits = exports.acquire_many(2).await.unwrap();
    permits.unlock().await.unwrap();
    soon(client.shutdown()).await;
    assert_eq!(denied(server), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_needs_what_is_documented_and_nothing_more() {
    let documented = include_str!("../../client/README.md");
    for rights in [COMMANDS, CATEGORY, introductions()] {
        for right in rights.split_whitespace() {
            assert!(documented.contains(right), "{right}");
        }
    }
    let server = Server::start();
    able_clerk(&server);
    everything(&server, connect(&server).await.unwrap()).await;
    if Version::at_hand().has_own_categories() {
        clerk(
            &server,
            &format!("~orders:* {CATEGORY} {}", introductions()),
        );
        everything(&server, connect(&server).await.unwrap()).await;
        // A client that knows a session's name could take it over, and RESET forgets the entries in
        // question.
        for command in [
            "RLOCK.SESSIONS",
            "RLOCK.LOG RESET",
            "RLOCK.BREAK orders:1",
            "RLOCK.LIMIT orders:1 2",
        ] {
            let told = server.run(format!("ACL DRYRUN clerk {command}"));
            assert!(told != "OK", "{command}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_sets_a_limit_needs_a_right_more_than_who_takes_permits() {
    let server = Server::start();
    able_clerk(&server);
    let client = connect(&server).await.unwrap();
    let refused = soon(client.set_limit("orders:5", 2)).await.unwrap_err();
    let said = refused.to_string();
    assert!(
        refused.is_refused() && said.contains("'rlock.limit'"),
        "{said}"
    );
    let documented = include_str!("../../client/README.md");
    assert!(documented.contains("`+rlock.limit`"));
    server.run("ACL SETUSER clerk +rlock.limit");
    assert_eq!(soon(client.set_limit("orders:5", 2)).await.unwrap(), None);
    let as_set = client.semaphore("orders:5", None);
    let permits = soon(as_set.acquire_many(2)).await.unwrap();
    soon(permits.unlock()).await.unwrap();
    // No right to the key in which the limit is kept was needed, but one to the name.
    let refused = soon(client.set_limit("stock", 2)).await.unwrap_err();
    assert!(refused.is_refused(), "{refused}");
}

/// The lines for users in `redis.conf`, as they would stand there.
fn users_of_the_file() -> Vec<&'static str> {
    let file = include_str!("../../redis.conf");
    let lines = file.lines().filter_map(|line| line.strip_prefix("# "));
    lines.filter(|line| line.starts_with("user ")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_users_in_the_file_can_do_what_they_are_for() {
    let lines = users_of_the_file();
    let [orders, worker, operator, nobody] = lines[..] else {
        panic!("{lines:?}");
    };
    let is_new = Version::at_hand().at_least((7, 2), (7, 2));
    let setinfo = if is_new { " +client|setinfo" } else { "" };
    let users = [
        orders,
        operator,
        nobody,
        "user harness on >secret ~* &* +@all",
    ];
    let builder = users.into_iter().fold(Server::builder(), Builder::config);
    let builder = builder.config(&format!("{worker}{setinfo}"));
    let server = builder.user("harness", "secret").start();
    let as_worker = format!("redis://worker:change-me@{}", server.address());
    let client = soon(calm().connect(&as_worker)).await.unwrap();
    everything(&server, client).await;

    let may = |user: &str, command: &str| {
        let told = server.run(format!("ACL DRYRUN {user} {command}"));
        assert_eq!(told, "OK", "{user}: {command}");
    };
    for command in [
        "RLOCK.ACQUIRE orders:1 o 1",
        "RLOCK.RENEW orders:1 o 1",
        "RLOCK.RELEASE orders:1 o",
    ] {
        may("orders", command);
    }
    for command in [
        "RLOCK.INFO a",
        "RLOCK.LIST",
        "RLOCK.LOG",
        "RLOCK.SESSIONS",
        "RLOCK.CANCEL a o",
        "RLOCK.BREAK a",
        "RLOCK.LIMIT a 2",
        "INFO",
        "CLIENT LIST",
        "SCAN 0",
        "TYPE a",
        "CONFIG GET rlock.*",
        "ACL GETUSER default",
        "MODULE LIST",
        "CLUSTER SHARDS",
    ] {
        may("operator", command);
    }
    let others = [
        ("orders", "RLOCK.BREAK orders:1"),
        ("orders", "RLOCK.ACQUIRE stock o 1"),
        ("worker", "RLOCK.SESSIONS"),
        ("worker", "RLOCK.LOG"),
        ("worker", "RLOCK.BREAK orders:1"),
        ("worker", "RLOCK.LIMIT orders:1 2"),
        ("operator", "RLOCK.ACQUIRE a o 1"),
        ("operator", "CONFIG SET maxmemory 0"),
        ("operator", "DEL a"),
        ("operator", "ACL SETUSER operator +@all"),
    ];
    for (user, command) in others {
        let told = server.run(format!("ACL DRYRUN {user} {command}"));
        assert!(told != "OK", "{user}: {command}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_without_permission_are_refused_and_not_retried_for_ever() {
    let server = Server::start();
    for rights in ["~orders:*", "~orders:* +rlock.events"] {
        clerk(&server, rights);
        let error = connect(&server).await.unwrap_err();
        assert!(error.is_refused(), "{error}");
        assert!(error.to_string().contains("NOPERM"), "{error}");
    }

    clerk(&server, "~orders:* +rlock.events +rlock.bind");
    let client = connect(&server).await.unwrap();
    let error = soon(client.lock("orders:1").lock()).await.unwrap_err();
    assert!(error.is_refused(), "{error}");

    able_clerk(&server);
    let error = soon(client.lock("stock").lock()).await.unwrap_err();
    assert!(error.is_refused(), "{error}");
    let guard = soon(client.lock("orders:1").lock()).await.unwrap();
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_is_told_at_once() {
    let server = Server::start();
    able_clerk(&server);
    for wrong in ["clerk:wrong", "nobody:secret"] {
        let url = format!("redis://{wrong}@{}", server.address());
        let error = soon(Client::connect(&url)).await.unwrap_err();
        assert!(error.is_refused(), "{error}");
        assert!(error.to_string().contains("WRONGPASS"), "{error}");
    }
    server.run("CONFIG SET requirepass hidden");
    let nameless = format!("redis://{}", server.address());
    let error = soon(Client::connect(&nameless)).await.unwrap_err();
    assert!(error.is_refused(), "{error}");
    let known = format!("redis://:hidden@{}", server.address());
    soon(Client::connect(&known)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_password_is_told_to_waiters_and_calls_work_when_it_is_back() {
    let server = Server::start();
    able_clerk(&server);
    let client = connect(&server).await.unwrap();
    let mut alice = server.connect();
    alice.take("orders:1", "alice");
    let waiting = wait_in_queue(&server, &client, "orders:1");
    server.run("ACL SETUSER clerk resetpass >other");
    alice.run("CLIENT KILL TYPE normal SKIPME yes");
    let error = soon(waiting).await.unwrap().unwrap_err();
    assert!(error.is_refused(), "{error}");
    assert!(error.to_string().contains("WRONGPASS"), "{error}");
    let error = soon(client.lock("orders:2").lock()).await.unwrap_err();
    assert!(error.is_refused(), "{error}");

    server.run("ACL SETUSER clerk >secret");
    let again = async {
        loop {
            match client.lock("orders:2").lock().await {
                Ok(guard) => return guard,
                Err(error) => assert!(error.is_refused(), "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon(again).await.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_and_servers_have_users_of_their_own() {
    let watched = Sentinels::start();
    for server in [watched.primary(), watched.replica()] {
        able_clerk(server);
    }
    let service = format!("redis://clerk:secret@{}", Sentinels::SERVICE);
    for number in 0..3 {
        // The documented rights, and nothing more.
        let user = "watcher on >hidden +sentinel|get-master-addr-by-name";
        let sentinel = watched.sentinel(number);
        assert_eq!(sentinel.run(format!("ACL SETUSER {user}")), "OK");
    }
    let urls = |who: &str| -> Vec<_> {
        let addresses = watched.addresses().into_iter();
        addresses.map(|at| format!("redis://{who}{at}")).collect()
    };
    let builder = calm().sentinels(urls("watcher:hidden@"));
    let client = soon(builder.connect(&service)).await.unwrap();
    let guard = client.lock("orders:1").lock().await.unwrap();
    let list = watched.primary().run("CLIENT LIST").text();
    let ours = list.lines().filter(|line| line.contains("cmd=rlock."));
    assert!(ours.clone().count() == 2, "{list}");
    assert!(
        ours.clone().all(|line| line.contains("user=clerk")),
        "{list}"
    );
    in_sync(watched.primary(), watched.replica());
    watched.fail_over();
    let confirmed = async {
        while let Err(error) = guard.renew().await {
            assert!(!error.is_lost(), "{error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon(confirmed).await;
    let primary = watched.primary();
    assert!(primary.holder("orders:1").is_some());
    soon(guard.unlock()).await.unwrap();

    // From now on a sentinel says nothing to who gives no password.
    for number in 0..3 {
        let sentinel = watched.sentinel(number);
        assert_eq!(sentinel.run("ACL SETUSER default resetpass >other"), "OK");
    }
    for (who, answer) in [("", "NOAUTH"), ("watcher:wrong@", "WRONGPASS")] {
        let builder = Client::builder().sentinels(urls(who));
        let error = soon(builder.connect(&service)).await.unwrap_err();
        assert!(error.is_refused(), "{error}");
        assert!(error.to_string().contains(answer), "{error}");
    }
    let builder = Client::builder().sentinels(urls(":other@"));
    soon(builder.connect(&service)).await.unwrap();
    let builder = Client::builder().sentinels(urls("watcher:hidden@"));
    soon(builder.connect(&service)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_of_a_quorum_are_connected_to_by_the_users_in_their_urls() {
    let servers = [(); 3].map(|()| Server::start());
    for server in &servers {
        able_clerk(server);
        server.run("ACL SETUSER default resetpass >hidden");
    }
    let builder = QuorumClient::builder()
        .server_timeout(Duration::from_secs(60))
        .settings(calm());
    let nameless = servers.iter().map(super::client::url);
    let error = soon(builder.clone().connect(nameless)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("NOAUTH"), "{error}");
    let client = builder.connect(servers.iter().map(url));
    let client = soon(client).await.unwrap();
    let guard = soon(client.lock("orders:1").lock()).await.unwrap();
    soon(guard.unlock()).await.unwrap();
    let error = soon(client.lock("stock").try_lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
}
