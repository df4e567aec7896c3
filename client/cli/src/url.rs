//! URLs of servers: they are read, with an explanation of the wrong part, and written for the
//! client.

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _};

use crate::exit::Failure;

/// The connection that a URL describes.
pub(crate) fn read(url: &str) -> Result<ConnectionInfo, Failure> {
    let info = url.into_connection_info();
    info.map_err(|_| Failure::usage(format!("a URL cannot be read: {}", fault(url))))
}

/// Which part of a URL is wrong. The text quotes none of it: a part may be a piece of a password.
fn fault(url: &str) -> &'static str {
    let Some((scheme, rest)) = url.split_once("://") else {
        return "it has no scheme, as redis:// (a comma separates URLs: percent-encode one in a \
                password as %2C)";
    };
    match scheme {
        "unix" | "redis+unix" | "valkey+unix" => {
            return "after unix:// comes the absolute path of a socket, and then \
                    ?db=NUMBER&user=NAME&pass=PASSWORD with what is needed of it";
        }
        "redis" | "rediss" | "valkey" | "valkeys" => {}
        _ => return "its scheme is none of redis://, rediss:// and unix://",
    }
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, tail) = rest.split_at(end);
    if tail.contains('@') {
        return "the user's name or the password has a /, a ? or a #: percent-encode it (%2F, %3F, \
                %23), or put the password into RLOCK_PASSWORD as it is";
    }
    let (_, place) = authority.rsplit_once('@').unwrap_or(("", authority));
    let (host, port) = match place.rsplit_once(']') {
        Some((host, port)) => (host, port.strip_prefix(':')),
        None => place
            .split_once(':')
            .map_or((place, None), |(host, port)| (host, Some(port))),
    };
    let database = tail.split(['?', '#']).next().unwrap_or_default();
    let database = database.trim_matches('/');
    if host.is_empty() {
        "the host is missing: redis://[user[:password]@]host[:port][/db]"
    } else if port.is_some_and(|port| !port.is_empty() && port.parse::<u16>().is_err()) {
        "the port is no number from 0 to 65535"
    } else if !database.is_empty() && database.parse::<i64>().is_err() {
        "the database, which follows the /, is no number"
    } else if tail.contains('#') {
        "only #insecure may follow the database"
    } else if ["0.0.0.0", "[::"].contains(&host) {
        "a server listens on that address, and nobody can connect to it"
    } else {
        "the host is no name and no address, or the user's name or the password is not UTF-8: \
         percent-encode every character but letters and digits there"
    }
}

/// A URL for this connection.
pub(crate) fn write(info: &ConnectionInfo) -> String {
    let settings = info.redis_settings();
    let user = settings.username().map(encoded);
    let password = settings.password().map(encoded);
    if let ConnectionAddr::Unix(path) = info.addr() {
        let path: Vec<_> = path.to_str().unwrap_or_default().split('/').collect();
        let path = path.into_iter().map(encoded).collect::<Vec<_>>().join("/");
        let user = user.map(|user| format!("&user={user}"));
        let password = password.map(|password| format!("&pass={password}"));
        let database = settings.db();
        return format!(
            "unix://{path}?db={database}{}{}",
            user.unwrap_or_default(),
            password.unwrap_or_default()
        );
    }
    let (scheme, host, port, end) = match info.addr() {
        ConnectionAddr::TcpTls {
            host,
            port,
            insecure,
            ..
        } => {
            let end = if *insecure { "#insecure" } else { "" };
            ("rediss", host, port, end)
        }
        ConnectionAddr::Tcp(host, port) => ("redis", host, port, ""),
        other => return other.to_string(),
    };
    let user = match (user, password) {
        (None, None) => String::new(),
        (user, None) => format!("{}@", user.unwrap_or_default()),
        (user, Some(password)) => format!("{}:{password}@", user.unwrap_or_default()),
    };
    let host = if host.contains(':') {
        format!("[{host}]")
    } else {
        host.clone()
    };
    format!("{scheme}://{user}{host}:{port}/{}{end}", settings.db())
}

/// Percent-encoded.
pub(crate) fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let each = text.bytes().map(|byte| match byte {
        byte if plain(byte) => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    });
    each.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_that_is_wrong_is_named_and_no_password_is_shown() {
        for (url, part) in [
            ("hidden", "no scheme"),
            ("hidden@h:1", "%2C"),
            ("http://hidden@h", "its scheme"),
            ("redis://me:hid/den@h:1", "percent-encode"),
            ("redis://me:hid?den@h:1", "percent-encode"),
            ("redis://me:hid#den@h:1", "percent-encode"),
            ("redis://:hidden@", "the host is missing"),
            ("redis://:hidden@:1", "the host is missing"),
            ("redis://me:hidden", "the port"),
            ("redis://me:hidden@h:65536", "the port"),
            ("redis://me:hidden@[::1]:x", "the port"),
            ("redis://me:hidden@h/zero", "the database"),
            ("rediss://me:hidden@h#x", "#insecure"),
            ("redis://me:hidden@0.0.0.0", "listens"),
            ("redis://me:hidden%ff@h", "percent-encode"),
            ("redis://me:hidden@h h", "the host is no name"),
            ("unix://?pass=hidden", "path of a socket"),
            ("unix:///s?db=x&pass=hidden", "db=NUMBER"),
        ] {
            let failure = read(url).expect_err(url);
            assert!(failure.text.contains(part), "{url}: {}", failure.text);
            assert!(!failure.text.contains("hid"), "{url}: {}", failure.text);
            assert_eq!(failure.status, crate::exit::USAGE);
        }
    }

    #[test]
    fn a_url_that_is_written_is_read_as_the_same() {
        for url in [
            "redis://h",
            "redis://me:p%40ss%2F%C3%A9@h:1/2",
            "redis://:pass@[::1]:7",
            "redis://me@h",
            "rediss://h:1#insecure",
            "unix:///tmp/a%20b%26c?db=3&user=m%26e&pass=s%25%3D+x",
        ] {
            let info = read(url).unwrap();
            let again = read(&write(&info)).unwrap();
            assert_eq!(format!("{:?}", info.addr()), format!("{:?}", again.addr()));
            let of = |info: &ConnectionInfo| {
                let settings = info.redis_settings();
                let words = [settings.username(), settings.password()];
                (words.map(|word| word.map(str::to_owned)), settings.db())
            };
            assert_eq!(of(&info), of(&again), "{url}");
        }
        assert_eq!(encoded("a:b@c/é~"), "a%3Ab%40c%2F%C3%A9~");
    }
}
