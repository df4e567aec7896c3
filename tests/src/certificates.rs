//! Certificates for servers that speak TLS, made when a test runs.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;

use tempfile::TempDir;

use crate::server::server_program;

/// An authority of our own, a certificate of it for servers on 127.0.0.1 and `localhost`, and one
/// for clients. The files are there as long as a copy of this value is.
#[derive(Debug, Clone)]
pub struct Certificates {
    directory: Arc<TempDir>,
}

impl Certificates {
    /// Makes them, with the `openssl` of the machine.
    #[track_caller]
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let certificates = Self {
            directory: Arc::new(directory),
        };
        let authority = "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign\n";
        certificates.make("authority", authority, None);
        let server = "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth\n";
        certificates.make("server", server, Some("authority"));
        certificates.make("client", "extendedKeyUsage=clientAuth\n", Some("authority"));
        certificates
    }

    /// Whether the server under test was built with TLS. If it was not, this says so on the
    /// terminal, and the test has nothing to do.
    pub fn are_understood() -> bool {
        // A server that knows the first line stumbles over the second.
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), "tls-port 0\nno-such-directive 0\n").expect("a file");
        let output = Command::new(server_program())
            .arg(file.path())
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|e| panic!("cannot start {:?}: {e}", server_program()));
        let complaint = [output.stdout, output.stderr].concat();
        let complaint = String::from_utf8_lossy(&complaint);
        assert!(!output.status.success(), "it starts: {complaint}");
        let understood = complaint.contains("no-such-directive");
        if !understood {
            eprintln!("skipped: {} was built without TLS", server_program());
        }
        understood
    }

    /// The authority's certificate, which a client must trust (PEM).
    pub fn authority(&self) -> PathBuf {
        self.path("authority.crt")
    }

    /// A client's certificate (PEM).
    pub fn client_certificate(&self) -> PathBuf {
        self.path("client.crt")
    }

    /// The key of the client's certificate (PEM).
    pub fn client_key(&self) -> PathBuf {
        self.path("client.key")
    }

    /// The lines of a server's configuration.
    pub(crate) fn of_a_server(&self) -> String {
        let mut lines = String::new();
        for (directive, file) in [
            ("tls-ca-cert-file", "authority.crt"),
            ("tls-cert-file", "server.crt"),
            ("tls-key-file", "server.key"),
            // With these a server is a client of others: of its primary, of its cluster.
            ("tls-client-cert-file", "client.crt"),
            ("tls-client-key-file", "client.key"),
        ] {
            let _ = writeln!(lines, "{directive} {}", self.path(file).display());
        }
        lines
    }

    fn path(&self, file: &str) -> PathBuf {
        self.directory.path().join(file)
    }

    /// A key and its certificate, signed by `issuer` or by itself.
    #[track_caller]
    fn make(&self, name: &str, extensions: &str, issuer: Option<&str>) {
        let of = |name: &str, ending| self.path(&format!("{name}.{ending}")).display().to_string();
        let (key, request, certificate) = (of(name, "key"), of(name, "csr"), of(name, "crt"));
        let extension_file = of(name, "ext");
        fs::write(&extension_file, extensions).expect("a file");
        let subject = format!("/CN=rlock-tests {name}");
        openssl(&[
            "ecparam",
            "-name",
            "prime256v1",
            "-genkey",
            "-noout",
            "-out",
            &key,
        ]);
        openssl(&[
            "req", "-new", "-key", &key, "-subj", &subject, "-out", &request,
        ]);
        let sign = ["x509", "-req", "-days", "2", "-in", &request];
        let out = ["-extfile", &extension_file, "-out", &certificate];
        match issuer.map(|issuer| (of(issuer, "crt"), of(issuer, "key"))) {
            None => openssl(&[&sign[..], &["-signkey", &key], &out].concat()),
            Some((by, by_key)) => {
                let by = ["-CA", &by, "-CAkey", &by_key, "-CAcreateserial"];
                openssl(&[&sign[..], &by, &out].concat());
            }
        }
    }
}

impl Default for Certificates {
    #[track_caller]
    fn default() -> Self {
        Self::new()
    }
}

#[track_caller]
fn openssl(arguments: &[&str]) {
    let output = Command::new("openssl")
        .args(arguments)
        .stdin(Stdio::null())
        .output();
    let output = output.expect("openssl, which scripts/install brings");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "openssl {arguments:?}: {complaint}"
    );
}
