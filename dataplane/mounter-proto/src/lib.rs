//! What is said between whoever mounts (a program with the right to, such as a CSI node plugin) and
//! the mounter, the process that serves mounts without that right.
//!
//! One request and one reply a connection of a unix stream socket. Each is a length (4 bytes,
//! little-endian) and so many bytes of JSON. The descriptor of [`Request::Serve`] rides with the
//! length. The sides may be of different versions: fields are only added, with a default.
#![forbid(unsafe_code)]

mod wire;

use serde::{Deserialize, Serialize};

pub use wire::{MESSAGE_BYTES_MAX, WireError, call, receive, reply};

/// What the mounter is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Request {
    /// Serve the connection to the kernel whose descriptor comes along. Answered once the mount can
    /// be used. A mount of this name that is ending is waited for; one that stands is busy.
    Serve(Serve),
    /// Stand elsewhere or prefer other servers from the next operation on.
    Rerank(Rerank),
    /// Name the mounts that stand.
    List,
    /// Wait until everything a mount has written is stored, its session with the cluster has ended
    /// and its descriptor is closed. The caller has unmounted before: a mount somebody still has
    /// open is busy, one that still stores after twenty seconds too. Refused once with what was lost, if data could not be stored. A mount nobody
    /// knows has ended already.
    End {
        /// Name of the mount.
        mount: String,
    },
}

/// A connection to serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Serve {
    /// Name the caller gives to the mount; one at a time has it.
    pub mount: String,
    /// Addresses of managers, `host:port`.
    pub managers: Vec<String>,
    /// Directory inside the cluster, from its root.
    pub subdirectory: String,
    /// Mount options, as after `hither mount -o`.
    #[serde(default)]
    pub options: String,
    /// Where it is mounted, for people.
    #[serde(default)]
    pub staging: String,
}

/// A new standpoint; what is `None` stays.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Rerank {
    /// Name of the mount.
    pub mount: String,
    /// Preferred labels, as after `preflabels=`; empty: none.
    #[serde(default)]
    pub preferred: Option<String>,
    /// Zone of the mount; empty: unknown.
    #[serde(default)]
    pub zone: Option<String>,
    /// Region of the mount.
    #[serde(default)]
    pub region: Option<String>,
    /// Node of the mount.
    #[serde(default)]
    pub node: Option<String>,
}

/// What the mounter answers.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Reply {
    /// It is done.
    pub ok: bool,
    /// What went wrong, and what to do.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// Why nothing was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<Kind>,
    /// Answer to [`Request::List`], ordered by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// With [`Kind::Taken`]: who has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<Holder>,
    /// What the user should know although it is done, such as a preference that matches nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub advice: Vec<String>,
}

/// Why a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    /// Options or preferred labels do not parse. A retry does not help.
    BadOptions,
    /// The cluster does not answer. A retry helps when it does.
    Unreachable,
    /// The directory inside the cluster is not there.
    NoSuchDirectory,
    /// The mount stands, is being made or is in use. A retry helps when it is not any more.
    Busy,
    /// No mount has this name.
    NoSuchMount,
    /// Too many requests are under way. A retry helps.
    Overloaded,
    /// The mounter has been told to end and takes no new mounts. Another one will.
    Ending,
    /// Data could not be stored: what fsync had not answered is lost. Said once.
    DataLost,
    /// Another mount has claimed the directory: see [`Reply::holder`].
    Taken,
    /// Everything else; the text says what.
    #[serde(other)]
    Internal,
}

/// Who has claimed a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Its session, for `evict=`.
    pub session: u64,
    /// Its host, or the node it said it runs on.
    pub host: String,
    /// Where it is mounted there.
    pub mount_point: String,
}

/// A mount that is served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Its name.
    pub mount: String,
    /// Where the caller said it is mounted.
    pub staging: String,
    /// Device number of the mount as `major:minor`; empty where the kernel does not tell.
    #[serde(default)]
    pub device: String,
    /// Options it was made with.
    pub options: String,
    /// Preferred labels it goes by now.
    #[serde(default)]
    pub preferred: String,
    /// Its session has ended, and with it its claim: it serves nothing more, and goes when its
    /// connection to the kernel is ended.
    #[serde(default)]
    pub over: bool,
}

impl Reply {
    /// It is done.
    #[must_use]
    pub fn done() -> Self {
        Self {
            ok: true,
            ..Self::default()
        }
    }

    /// It was refused.
    #[must_use]
    pub fn refused(kind: Kind, error: impl Into<String>) -> Self {
        Self {
            error: error.into(),
            kind: Some(kind),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_on_the_wire_stay() {
        let serve = Request::Serve(Serve {
            mount: "m".into(),
            managers: vec!["h:1".into()],
            subdirectory: "/v".into(),
            options: "ro".into(),
            staging: "/s".into(),
        });
        assert_eq!(
            serde_json::to_string(&serve).unwrap(),
            r#"{"op":"serve","mount":"m","managers":["h:1"],"subdirectory":"/v","options":"ro","staging":"/s"}"#
        );
        assert_eq!(
            serde_json::to_string(&Request::List).unwrap(),
            r#"{"op":"list"}"#
        );
        assert_eq!(
            serde_json::to_string(&Reply::refused(Kind::BadOptions, "no")).unwrap(),
            r#"{"ok":false,"error":"no","kind":"bad_options"}"#
        );
    }

    #[test]
    fn a_later_version_is_understood() {
        let reply: Reply =
            serde_json::from_str(r#"{"ok":false,"error":"x","kind":"of_tomorrow","more":1}"#)
                .unwrap();
        assert_eq!(reply.kind, Some(Kind::Internal));
        let rerank: Request =
            serde_json::from_str(r#"{"op":"rerank","mount":"m","preferred":""}"#).unwrap();
        let expected = Rerank {
            mount: "m".into(),
            preferred: Some(String::new()),
            ..Rerank::default()
        };
        assert_eq!(rerank, Request::Rerank(expected));
    }
}
