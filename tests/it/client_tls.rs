//! The client over TLS.

use std::error::Error as _;
use std::fs;

use rlock_client::{Client, ClientBuilder, Error, blocking};
use rlock_tests::{Certificates, Server, until};

use super::client::{soon, wait_in_line};

fn url(server: &Server) -> String {
    format!("rediss://{}", server.tls_address())
}

/// Settings with which the server is trusted.
fn trusting(certificates: &Certificates) -> ClientBuilder {
    Client::builder().root_certificate(fs::read(certificates.authority()).unwrap())
}

/// The same, with a certificate to show.
fn known(certificates: &Certificates) -> ClientBuilder {
    trusting(certificates).client_certificate(
        fs::read(certificates.client_certificate()).unwrap(),
        fs::read(certificates.client_key()).unwrap(),
    )
}

/// The error with what caused it.
fn whole(error: &Error) -> String {
    let cause = error.source().map(ToString::to_string);
    format!("{error}: {}", cause.unwrap_or_default())
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
    let waiting = wait_in_line(&server, &client, "k");
    let mut observer = server.connect();
    observer.run("CLIENT KILL TYPE normal SKIPME yes");
    until("it is in line again", || server.line("k").len() == 1);
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
async fn a_server_that_nobody_vouches_for_is_not_spoken_to() {
    if !Certificates::are_understood() {
        return;
    }
    let certificates = Certificates::new();
    let server = Server::builder().tls(&certificates).start();
    let error = Client::connect(&url(&server)).await.unwrap_err();
    assert!(error.is_could_not_ask(), "{error}");
    assert!(whole(&error).contains("UnknownIssuer"), "{}", whole(&error));
    // The certificate is for this address and for `localhost`, and for nothing else.
    let other = url(&server).replace("127.0.0.1", "127.0.0.2");
    let error = trusting(&certificates).connect(&other).await.unwrap_err();
    assert!(error.is_could_not_ask(), "{error}");
    let named = url(&server).replace("127.0.0.1", "localhost");
    trusting(&certificates).connect(&named).await.unwrap();
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
    assert!(error.is_could_not_ask(), "{}", whole(&error));
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
    let client = blocking::Client::connect_with(trusting(&certificates), &url(&server)).unwrap();
    client.lock("k").lock().unwrap().unlock().unwrap();
}
