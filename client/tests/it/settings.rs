//! Settings that cannot be kept are refused when the client connects, and not bent in silence.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that meets the unexpected should fail"
)]

use std::time::Duration;

use rlock_client::{Client, ClientBuilder, ErrorKind, QuorumBuilder, QuorumClient};

/// Where nobody is.
const NOWHERE: &str = "redis+unix:///nowhere";

const MS: Duration = Duration::from_millis(1);
const US: Duration = Duration::from_micros(1);
const LONGEST: Duration = Duration::from_millis((1 << 53) - 1);
const HOUR: Duration = Duration::from_secs(3_600);

/// The error of connecting with these settings, where no server listens.
async fn told(builder: &ClientBuilder) -> (ErrorKind, String) {
    let error = builder.clone().connect(NOWHERE).await;
    let error = error.expect_err("nobody is there");
    (error.kind(), error.to_string())
}

#[tokio::test]
async fn what_is_out_of_bounds_is_refused_with_the_bounds() {
    let builder = Client::builder;
    let bound = "from 1 to 9007199254740991 ms";
    let cases = [
        (builder().lease(Duration::ZERO), "lease", bound),
        (builder().lease(999 * US), "lease", bound),
        (builder().lease(LONGEST + MS), "lease", bound),
        (builder().grace(900 * US), "grace", "from 1 to 3600000 ms"),
        (
            builder().grace(HOUR + MS),
            "grace is zero or from 1 to 3600000 ms, and not 3600.001s",
            "",
        ),
        (builder().max_hold(Duration::ZERO), "max_hold", bound),
        (
            builder().response_timeout(Duration::ZERO),
            "response_timeout",
            "from 1 to 1073741824000 ms",
        ),
        (
            builder().response_timeout(Duration::MAX),
            "response_timeout",
            "from 1 to 1073741824000 ms",
        ),
        (
            builder().renew_every(Duration::ZERO),
            "renew_every",
            "from 1 to 15000 ms",
        ),
        (
            builder().renew_every(15_001 * MS),
            "renew_every",
            "from 1 to 15000 ms",
        ),
        (
            builder().acknowledged_by(1, 999 * US),
            "acknowledged_by",
            bound,
        ),
        (
            builder().acknowledged_on_disk(0, Duration::ZERO),
            "acknowledged_on_disk",
            bound,
        ),
        (builder().sentinels([""; 0]), "sentinels", "at least one"),
        (builder().label(""), "label", "from 1 to 256 characters"),
        (builder().label("two words"), "label", "no blanks"),
        (builder().label("a".repeat(257)), "label", "256"),
    ];
    for (builder, setting, bound) in cases {
        let (kind, text) = told(&builder).await;
        assert_eq!(kind, ErrorKind::Refused, "{text}");
        assert!(text.contains(setting) && text.contains(bound), "{text}");
    }
}

#[tokio::test]
async fn what_is_within_bounds_is_tried() {
    let builder = Client::builder;
    let settings = [
        builder().grace(Duration::ZERO),
        builder().grace(MS),
        builder().lease(MS),
        builder().lease(LONGEST).grace(HOUR).max_hold(LONGEST),
        builder().renew_every(15_000 * MS),
        builder().lease(2 * MS).renew_every(MS),
        builder().acknowledged_by(1, MS),
        builder().acknowledged_by(0, Duration::ZERO),
        builder().label("a".repeat(256)),
    ];
    for builder in settings {
        let (kind, text) = told(&builder).await;
        assert_eq!(kind, ErrorKind::Unavailable, "{text}");
    }
}

#[tokio::test]
async fn sentinels_are_not_for_a_cluster() {
    let builder = Client::builder().sentinels(["redis://a"]);
    let error = builder.connect_cluster([NOWHERE]).await;
    let error = error.expect_err("nobody is there");
    assert!(error.is_refused(), "{error}");
    assert!(error.to_string().contains("sentinels"), "{error}");
}

#[tokio::test]
async fn settings_that_are_not_for_a_quorum_are_refused() {
    let told = async |builder: QuorumBuilder| {
        let servers = [1, 2, 3].map(|server| format!("{NOWHERE}/{server}"));
        let error = builder.connect(servers).await;
        let error = error.expect_err("nobody is there");
        (error.kind(), error.to_string())
    };
    let settings = |settings| QuorumClient::builder().settings(settings);
    let builder = Client::builder;
    let cases = [
        (settings(builder().sentinels(["redis://a"])), "sentinels"),
        (
            settings(builder().acknowledged_by(1, MS)),
            "acknowledgements",
        ),
        (
            settings(builder().acknowledged_on_disk(0, MS)),
            "acknowledgements",
        ),
        (settings(builder().grace(US)), "grace"),
        (
            QuorumClient::builder().server_timeout(Duration::ZERO),
            "server_timeout",
        ),
    ];
    for (builder, setting) in cases {
        let (kind, text) = told(builder).await;
        assert_eq!(kind, ErrorKind::Refused, "{text}");
        assert!(text.contains(setting), "{text}");
    }
    let (kind, text) = told(QuorumClient::builder()).await;
    assert_eq!(kind, ErrorKind::Unavailable, "{text}");
}
