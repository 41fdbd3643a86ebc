//! Reaching a cluster from the command line.

use std::fmt::Display;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use hither_managerlink::ManagerLink;
use hither_net::{Identity, NetError, NoHandler, Reply, connect};
use hither_proto::common::Role;
use hither_proto::ids::MapVersion;
use hither_proto::kind::Kind;
use prost::Message;
use tokio::net::{TcpStream, lookup_host};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

/// Time a command gives the cluster.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// Time for the first answer of any manager: a wrong address is told within it.
pub(crate) const REACH_IN: Duration = Duration::from_secs(2);
/// How long a manager that refuses connections is tried again: it may be starting.
pub(crate) const REFUSED_FOR: Duration = Duration::from_secs(1);
/// Pause between such attempts.
const REFUSED_PAUSE: Duration = Duration::from_millis(100);
/// After this long it is said what a command waits for.
const NOTICE_AFTER: Duration = Duration::from_secs(2);

/// A link to the managers the command line names, one of which can be reached.
pub(crate) async fn link(cluster: Option<&str>) -> anyhow::Result<ManagerLink> {
    let addresses = named(cluster)?;
    reach(&addresses, REACH_IN, REFUSED_FOR).await?;
    Ok(link_to(addresses))
}

/// A link to managers that may still be starting.
pub(crate) fn link_to(addresses: Vec<String>) -> ManagerLink {
    ManagerLink::start(addresses, admin(), "")
}

/// Addresses of the managers as the command line names them.
pub(crate) fn named(cluster: Option<&str>) -> anyhow::Result<Vec<String>> {
    let Some(cluster) = cluster else {
        bail!("which cluster? give --cluster HOST:PORT or set HITHER_CLUSTER");
    };
    manager_addresses(cluster)
}

/// Addresses separated by commas, each checked.
pub(crate) fn manager_addresses(text: &str) -> anyhow::Result<Vec<String>> {
    let all: Vec<String> = text
        .split(',')
        .map(str::trim)
        .filter(|address| !address.is_empty())
        .map(str::to_owned)
        .collect();
    if all.is_empty() {
        bail!("{text:?} names no manager: write HOST:PORT, more of them separated by commas");
    }
    for address in &all {
        check_address(address)?;
    }
    Ok(all)
}

/// Whether a text can be an address at all.
pub(crate) fn check_address(address: &str) -> anyhow::Result<()> {
    if address.contains("://") {
        bail!("{address:?} is no address: write HOST:PORT without a scheme");
    }
    let Some((host, port)) = address.rsplit_once(':') else {
        bail!("{address:?} has no port: write HOST:PORT, for example {address}:7650");
    };
    if !port.parse::<u16>().is_ok_and(|port| port != 0) {
        bail!("{address:?}: {port:?} is no port: write a number from 1 to 65535");
    }
    let inner = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    let sound = match inner {
        Some(inner) => inner.parse::<std::net::Ipv6Addr>().is_ok(),
        None if host.contains(':') => {
            bail!("{address:?}: write an IPv6 address in brackets, such as [::1]:7650");
        }
        None => {
            !host.is_empty()
                && host
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_'))
        }
    };
    if !sound {
        bail!("{address:?}: {host:?} is no host: write HOST:PORT");
    }
    Ok(())
}

/// Waits until one of the addresses takes a connection; those that refuse are tried again for a while.
///
/// # Errors
/// What is wrong with each of them, when none does in time.
pub(crate) async fn reach(
    addresses: &[String],
    at_most: Duration,
    refused_for: Duration,
) -> anyhow::Result<()> {
    let mut attempts = JoinSet::new();
    for address in addresses {
        let address = address.clone();
        attempts.spawn(async move {
            let reached = timeout(at_most, try_one(&address, refused_for)).await;
            let silence = || Err(format!("no answer within {} s", at_most.as_secs_f32()));
            let mut reached = reached.unwrap_or_else(|_| silence());
            if reached.is_ok() {
                reached = say_hello(&address).await;
            }
            reached.map_err(|reason| format!("{address}: {reason}"))
        });
    }
    let mut reasons = Vec::new();
    while let Some(attempt) = attempts.join_next().await {
        match attempt {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(reason)) => reasons.push(reason),
            Err(error) => reasons.push(error.to_string()),
        }
    }
    reasons.sort();
    bail!(
        "no manager answers ({}): is the cluster running, and is this its address?",
        reasons.join("; ")
    )
}

async fn try_one(address: &str, refused_for: Duration) -> Result<(), String> {
    let begun = Instant::now();
    loop {
        // A name nobody knows now is one nobody will know in a second.
        let resolved: Vec<_> = match lookup_host(address).await {
            Ok(found) => found.collect(),
            Err(error) => return Err(format!("the name cannot be resolved: {error}")),
        };
        match TcpStream::connect(&resolved[..]).await {
            Ok(_) => return Ok(()),
            Err(error)
                if error.kind() == ErrorKind::ConnectionRefused
                    && begun.elapsed() < refused_for =>
            {
                sleep(REFUSED_PAUSE).await;
            }
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                return Err("nobody listens there (connection refused)".into());
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// Whether what listens there speaks as a manager does. One that says nothing may be
/// paused or busy: whoever asks it something waits for that.
async fn say_hello(address: &str) -> Result<(), String> {
    match connect(address, &admin(), Arc::new(NoHandler), REACH_IN).await {
        Ok(connection) => {
            let role = connection.peer().map(|peer| peer.role);
            connection.close();
            let other = match role {
                Some(Role::Chunkserver) => "chunkserver",
                Some(Role::Mds) => "metadata server",
                _ => return Ok(()),
            };
            return Err(format!(
                "this is the port of a {other}, and a manager's is wanted"
            ));
        }
        Err(NetError::Lost(_) | NetError::Protocol(_)) => {
            return Err("what listens there is no process of hither, or is just ending".into());
        }
        Err(_) => {}
    }
    Ok(())
}

/// How the command line introduces itself.
pub(crate) fn admin() -> Identity {
    Identity {
        role: Role::Admin,
        boot_id: rand::random(),
        ..Identity::default()
    }
}

/// Does something that may take a while, and says after a moment what it waits for.
pub(crate) async fn patiently<T>(what: impl Display, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    tokio::select! {
        done = &mut work => return done,
        () = sleep(NOTICE_AFTER) => {}
    }
    eprintln!("hither: waiting for {what}");
    work.await
}

/// Asks the leading manager; the error is for people.
pub(crate) async fn ask(
    link: &ManagerLink,
    kind: Kind,
    message: &impl Message,
) -> anyhow::Result<Reply> {
    let what = format!("a manager that leads, for {} s at most", PATIENCE.as_secs());
    told(patiently(what, link.call(kind, message, PATIENCE)).await)
}

/// Asks the leading manager for something that takes as long as it takes.
pub(crate) async fn ask_long(
    link: &ManagerLink,
    kind: Kind,
    message: &impl Message,
    what: &str,
    at_most: Duration,
) -> anyhow::Result<Reply> {
    let map = patiently(
        "a manager that leads",
        link.at_least(MapVersion(1), PATIENCE),
    )
    .await
    .context("find the cluster")?;
    let leader = map.managers().first().context("the map names no manager")?;
    let connection = connect(leader, &admin(), Arc::new(NoHandler), PATIENCE).await?;
    let reply = patiently(what, connection.call(kind, message, &[], at_most)).await;
    connection.close();
    told(reply)
}

fn told(reply: Result<Reply, NetError>) -> anyhow::Result<Reply> {
    match reply {
        Err(NetError::Refused { failure, .. }) if !failure.text.is_empty() => {
            bail!("{}", failure.text)
        }
        other => other.context("ask the manager"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked_before_anything_is_asked() {
        for sound in ["h:1", "10.0.0.1:7650", "[::1]:7650", "a-b.c_d:65535"] {
            assert!(check_address(sound).is_ok(), "{sound}");
        }
        let wrong = [
            ("host", "no port"),
            ("host:", "no port"),
            ("host:0", "no port"),
            ("host:70000", "no port"),
            (":7650", "no host"),
            ("::1:7650", "brackets"),
            ("[h]:7650", "no host"),
            ("http://h:1", "scheme"),
            ("a b:1", "no host"),
        ];
        for (address, hint) in wrong {
            let error = check_address(address).unwrap_err().to_string();
            assert!(error.contains(hint), "{address}: {error}");
        }
        assert_eq!(manager_addresses("a:1, b:2,").unwrap(), ["a:1", "b:2"]);
        assert!(manager_addresses(",").is_err());
    }

    #[tokio::test]
    async fn an_address_nobody_listens_at_is_told_soon_and_by_name() {
        let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = free.local_addr().unwrap().to_string();
        assert!(
            reach(std::slice::from_ref(&address), REACH_IN, REFUSED_FOR)
                .await
                .is_ok()
        );
        drop(free);
        let error = reach(std::slice::from_ref(&address), REACH_IN, REFUSED_FOR)
            .await
            .unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains(&address) && text.contains("refused"),
            "{text}"
        );
        let unknown = "no-such-host.invalid:1".to_owned();
        let error = reach(&[unknown], REACH_IN, REFUSED_FOR)
            .await
            .unwrap_err()
            .to_string();
        assert!(error.contains("no-such-host.invalid:1"), "{error}");
    }

    #[tokio::test]
    async fn one_manager_that_answers_is_enough() {
        let (identity, front) = (Identity::default(), Arc::new(NoHandler));
        let listener = hither_net::Listener::bind("127.0.0.1:0", identity, front)
            .await
            .unwrap();
        let good = listener.address().to_string();
        let both = ["no-such-host.invalid:1".to_owned(), good];
        assert!(reach(&both, REACH_IN, REFUSED_FOR).await.is_ok());
    }

    #[tokio::test]
    async fn another_process_of_the_cluster_is_told_from_a_manager() {
        for (role, word) in [
            (Role::Chunkserver, "a chunkserver"),
            (Role::Mds, "a metadata server"),
        ] {
            let identity = Identity {
                role,
                ..Identity::default()
            };
            let listener = hither_net::Listener::bind("127.0.0.1:0", identity, Arc::new(NoHandler))
                .await
                .unwrap();
            let address = listener.address().to_string();
            let error = reach(std::slice::from_ref(&address), REACH_IN, REFUSED_FOR)
                .await
                .unwrap_err()
                .to_string();
            assert!(error.contains(&address) && error.contains(word), "{error}");
        }
    }

    #[tokio::test]
    async fn another_service_is_told_from_a_manager() {
        let other = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = other.local_addr().unwrap().to_string();
        let served = tokio::spawn(async move {
            loop {
                let (mut peer, _) = other.accept().await.unwrap();
                let text = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
                let _ = tokio::io::AsyncWriteExt::write_all(&mut peer, text).await;
            }
        });
        let error = reach(&[address], REACH_IN, REFUSED_FOR)
            .await
            .unwrap_err()
            .to_string();
        assert!(error.contains("no process of hither"), "{error}");
        served.abort();
    }
}
