//! The client over TLS.

use std::error::Error as _;
use std::fs;
use std::net::TcpListener;
use std::time::Duration;

use rlock_client::{ClientBuilder, QuorumClient, blocking};
use rlock_tests::{Certificates, Sentinels, Server, Shards, in_sync, until};

use super::client::{calm, soon, wait_in_queue};

fn url(server: &Server) -> String {
    format!("rediss://{}", server.tls_address())
}

/// Settings with which the server is trusted.
fn trusting(certificates: &Certificates) -> ClientBuilder {
    calm().root_certificate(fs::read(certificates.authority()).unwrap())
}

/// The same, with a certificate to show.
fn known(certificates: &Certificates) -> ClientBuilder {
    trusting(certificates).client_certificate(
        fs::read(certificates.client_certificate()).unwrap(),
        fs::read(certificates.client_key()).unwrap(),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_connections_are_encrypted_also_when_they_are_opened_anew() {
    if !Certificates::are_understood() {
        return;
    }
    let certificates = Certificates::new();
    let server = Server::builder().tls(&certificates).start();
    let client = trusting(&certificates).connect(&url(&server)).await;
    let client = client.unwrap();
    let guard = client.lock("k").lock().await.unwrap();
    let waiting = wait_in_queue(&server, &client, "k");
    let mut observer = server.connect();
    observer.run("CLIENT KILL TYPE normal SKIPME yes");
    until("it waits again", || server.waiting_owners("k").len() == 1);
    soon(guard.unlock()).await.unwrap();
    soon(soon(waiting).await.unwrap().unwrap().unlock())
        .await
        .unwrap();
    let port = format!(":{} ", server.tls_address().port());
    let list = observer.run("CLIENT LIST").text();
    let encrypted = list.lines().filter(|line| line.contains(&port));
    assert_eq!(encrypted.count(), 2, "{list}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_a_trusted_certificate_is_not_used() {
    if !Certificates::are_understood() {
        return;
    }
    let certificates = Certificates::new();
    let server = Server::builder().tls(&certificates).start();
    let error = calm().connect(&url(&server)).await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    assert!(error.to_string().contains("UnknownIssuer"), "{error}");
    // The certificate is for this address and for `localhost`, and for nothing else.
    let other = url(&server).replace("127.0.0.1", "127.0.0.2");
    let error = trusting(&certificates).connect(&other).await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    let named = url(&server).replace("127.0.0.1", "localhost");
    trusting(&certificates).connect(&named).await.unwrap();
}

/// Programs print an error and not its sources: its text names the cause, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_reason_why_there_is_no_connection_is_said_once() {
    if !Certificates::are_understood() {
        return;
    }
    let certificates = Certificates::new();
    let server = Server::builder().tls(&certificates).start();
    let nobody = {
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        port.local_addr().unwrap()
    };
    let plain_text_to_tls = format!("redis://{}", server.tls_address());
    let tls_to_plain_text = format!("rediss://{}", server.address());
    let cases = [
        (
            calm(),
            url(&server),
            "no connection: invalid peer certificate",
        ),
        (calm(), plain_text_to_tls, "no connection: "),
        // The server reads on, and the client waits for as long as it may.
        (
            calm().response_timeout(Duration::from_millis(300)),
            tls_to_plain_text,
            "no connection: ",
        ),
        (
            calm(),
            format!("redis://{nobody}"),
            "no connection: Connection refused",
        ),
        (
            calm().root_certificate("none"),
            url(&server),
            "the certificates or the key cannot be read: no certificate in PEM",
        ),
    ];
    let mut texts = Vec::new();
    for (settings, url, reason) in cases {
        let error = settings.connect(&url).await.unwrap_err();
        // Trying again may help, unless it is the settings.
        let is_of_settings = reason.starts_with("the certificates");
        assert_eq!(error.is_refused(), is_of_settings, "{error}");
        assert_eq!(error.is_unavailable(), !is_of_settings, "{error}");
        assert!(error.source().is_none(), "{error}");
        let text = error.to_string();
        assert_eq!(text.matches(reason).count(), 1, "{url}: {text}");
        texts.push(text);
    }
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), 5, "{texts:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_asks_for_a_certificate_is_shown_it() {
    if !Certificates::are_understood() {
        return;
    }
    let certificates = Certificates::new();
    let strict = Server::builder().tls_with_client_certificates(&certificates);
    let server = strict.start();
    let error = trusting(&certificates).connect(&url(&server)).await;
    let error = error.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    let client = known(&certificates).connect(&url(&server)).await.unwrap();
    let guard = client.lock("k").lock().await.unwrap();
    guard.unlock().await.unwrap();
}

#[test]
fn programs_without_async_are_encrypted_too() {
    if !Certificates::are_understood() {
        return;
    }
    let certificates = Certificates::new();
    let server = Server::builder().tls(&certificates).start();
    let client = blocking::ClientBuilder::from(trusting(&certificates))
        .connect(&url(&server))
        .unwrap();
    client.lock("k").lock().unwrap().unlock().unwrap();
}

/// How many connections the server has at its port for TLS.
fn encrypted(server: &Server) -> usize {
    let port = format!(":{} ", server.tls_address().port());
    let list = server.run("CLIENT LIST").text();
    list.lines().filter(|line| line.contains(&port)).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_are_asked_over_tls_also_for_a_primary_without_tls() {
    if !Certificates::are_understood() {
        return;
    }
    let certificates = Certificates::new();
    let watched = Sentinels::start_with_tls(&certificates);
    let addresses = watched.tls_addresses().into_iter();
    let sentinels: Vec<_> = addresses.map(|at| format!("rediss://{at}")).collect();
    let service = format!("redis://{}", Sentinels::SERVICE);
    let builder = trusting(&certificates);
    let client = soon(builder.sentinels(&sentinels).connect(&service));
    let client = client.await.unwrap();
    let guard = client.lock("k").lock().await.unwrap();
    in_sync(watched.primary(), watched.replica());
    watched.fail_over();
    let waiting = client.lock("k");
    let waiting = tokio::spawn(async move { waiting.lock().await });
    until("the wait is in the queue at the new primary", || {
        watched.primary().waiting_owners("k").len() == 1
    });
    soon(guard.unlock()).await.unwrap();
    soon(soon(waiting).await.unwrap().unwrap().unlock())
        .await
        .unwrap();

    let builder = calm().sentinels(&sentinels);
    let error = soon(builder.connect(&service)).await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    assert!(error.to_string().contains("UnknownIssuer"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_a_sentinel_knows_by_tls_is_connected_to_by_it() {
    if !Certificates::are_understood() {
        return;
    }
    let certificates = Certificates::new();
    let server = Server::builder().tls_among_servers(&certificates).start();
    let sentinel = Sentinels::alone_over_tls(&server, &certificates);
    let builder = trusting(&certificates).sentinels([url(&sentinel)]);
    let service = format!("rediss://{}", Sentinels::SERVICE);
    let before = encrypted(&server);
    let client = soon(builder.connect(&service)).await.unwrap();
    assert_eq!(encrypted(&server), before + 2);
    let guard = client.lock("k").lock().await.unwrap();
    let waiting = wait_in_queue(&server, &client, "k");
    soon(guard.unlock()).await.unwrap();
    soon(soon(waiting).await.unwrap().unwrap().unlock())
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_nodes_of_a_cluster_are_used_over_tls() {
    if !Certificates::are_understood() {
        return;
    }
    let certificates = Certificates::new();
    let mut shards = Shards::of(&Server::builder().tls_among_servers(&certificates));
    let seed = url(&shards.nodes()[0]);
    let builder = trusting(&certificates);
    let client = builder.connect_cluster([&seed]).await.unwrap();
    for node in shards.primaries() {
        let before = encrypted(node);
        let name = shards.name_at(node, "k");
        let guard = client.lock(&*name).lock().await.unwrap();
        assert_eq!(node.holder(&name).as_deref(), Some(guard.owner().as_str()));
        assert!(encrypted(node) >= before.max(2), "{name}");
        let waiting = wait_in_queue(node, &client, &name);
        soon(guard.unlock()).await.unwrap();
        soon(soon(waiting).await.unwrap().unwrap().unlock())
            .await
            .unwrap();
    }

    // Where a node sends the client, and where the cluster says that the slot is by then.
    let guard = client.lock("moves").lock().await.unwrap();
    let from = shards.primary_of("moves").port();
    let primaries = shards.primaries();
    let to = primaries.iter().find(|node| node.port() != from).unwrap();
    shards.move_slot("moves", to);
    soon(guard.renew()).await.unwrap();
    assert_eq!(to.holder("moves").as_deref(), Some(guard.owner().as_str()));
    in_sync(to, shards.replica_of("moves"));
    shards.kill_primary_of("moves");
    let renewed = async {
        while let Err(error) = guard.renew().await {
            assert!(!error.is_lost(), "{error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon(renewed).await;
    soon(guard.unlock()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_of_a_quorum_are_spoken_to_over_tls() {
    if !Certificates::are_understood() {
        return;
    }
    let certificates = Certificates::new();
    let server = || Server::builder().tls_with_client_certificates(&certificates);
    let servers = [(); 3].map(|()| server().start());
    let builder = QuorumClient::builder().server_timeout(Duration::from_secs(60));
    let error = builder.clone().settings(trusting(&certificates));
    let error = soon(error.connect(servers.iter().map(url))).await;
    assert!(error.unwrap_err().is_unavailable());
    let client = builder.settings(known(&certificates));
    let client = soon(client.connect(servers.iter().map(url))).await.unwrap();
    let guard = soon(client.lock("k").lock()).await.unwrap();
    until("it is held on all of them", || {
        servers.iter().all(|server| server.holder("k").is_some())
    });
    soon(guard.unlock()).await.unwrap();
    assert!(servers.iter().all(|server| encrypted(server) == 2));
}
