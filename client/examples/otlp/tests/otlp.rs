//! The example with a real server and a collector that keeps the metrics it receives.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Command;
use std::thread;

use rlock_tests::Server;

/// Answers each request, and tells what all of them were.
fn collect(listener: &TcpListener) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let (mut socket, _) = listener.accept().unwrap();
        let mut bytes = vec![0; 65536];
        loop {
            let read = socket.read(&mut bytes).unwrap();
            all.extend(bytes.iter().take(read));
            let text = String::from_utf8_lossy(&all);
            if text.contains("rlock.client.hold.duration") || read == 0 {
                socket
                    .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                    .unwrap();
                break;
            }
        }
        if String::from_utf8_lossy(&all).contains("rlock.client.hold.duration") {
            return all;
        }
    }
}

#[test]
fn what_is_measured_reaches_a_collector() {
    let server = Server::start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let collector = thread::spawn(move || collect(&listener));
    let told = Command::new(env!("CARGO_BIN_EXE_rlock-example-otlp"))
        .args([&format!("redis://{}", server.address()), "20"])
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        .output()
        .unwrap();
    assert!(told.status.success(), "{told:?}");
    let sent = collector.join().unwrap();
    let sent = String::from_utf8_lossy(&sent);
    assert!(sent.starts_with("POST /v1/metrics "), "{sent}");
    for part in ["stock", "rlock.client.wait.duration"] {
        assert!(sent.contains(part), "{part} in {sent}");
    }
}
