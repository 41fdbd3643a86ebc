//! The managed etcd of a cluster: its certificates, its members, and the next step with them.

use std::collections::BTreeMap;

use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, ContainerState, Pod, Secret};
use kube::api::{Patch, PatchParams};
use kube::runtime::events::EventType;
use kube::{Api, ResourceExt as _};
use serde_json::json;
use tokio::time::Instant;

use super::Context;
use super::calls;
use super::cluster::Memory;
use crate::api::HitherCluster;
use crate::check::Refusal;
use crate::desired::{
    certificate_names, certificate_secrets, certificates_of, etcd_authority_secret,
    etcd_client_secret, etcd_member_secret, etcd_set, etcd_state, etcd_state_object, member_names,
    members_host, peers_domain, short_hash,
};
use crate::error::Error;
use crate::etcd::ask::{AskError, Credentials, Link, Peer};
use crate::etcd::certificates::Certificates;
use crate::etcd::member::peer_url;
use crate::etcd::message::Message;
use crate::etcd::plan::{LetIn, Place, Plan, Said, Step, World};
use crate::etcd::state::State;
use crate::etcd::{CLIENT_PORT, QUOTA_BYTES};
use crate::seen::{Seen, container_runs};

/// What is remembered between passes; losing it costs work, no more.
#[derive(Default)]
pub(super) struct Links {
    credentials: Option<Credentials>,
    /// By pod, and the address it had.
    links: BTreeMap<String, (String, Link)>,
    /// When files were made smaller, by pod.
    defragmented: BTreeMap<String, Instant>,
}

/// What was seen of the store's certificates and, if it is managed, members.
#[derive(Default)]
pub(super) struct Look {
    /// Stands for what managers and metadata servers show and trust.
    pub(super) certificates: Option<String>,
    /// Stands for what members trust.
    pub(super) trust: Option<String>,
    /// What is missing for servers to start.
    pub(super) refused: Option<Refusal>,
    managed: Option<Managed>,
}

struct Managed {
    certificates: Certificates,
    has_state: bool,
    state: State,
    pods: Vec<Pod>,
    /// A member with a quorum behind it.
    asked: Option<Link>,
    links: BTreeMap<String, Link>,
}

/// Looks at the store.
pub(super) async fn look(
    context: &Context,
    cluster: &HitherCluster,
    memory: &mut Memory,
    seen: &mut Seen,
) -> Result<Look, Error> {
    let store = &cluster.spec.metadata_store;
    let namespace = cluster.namespace().unwrap_or_default();
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &namespace);
    let get = async |name: String| {
        calls::ask(format!("read secret {name}"), secrets.get_opt(&name)).await
    };
    if let Some(tls) = store.etcd.as_ref().and_then(|etcd| etcd.tls.as_ref()) {
        let secret = get(tls.secret_name.clone()).await?;
        return Ok(given(&tls.secret_name, secret.as_ref()));
    }
    if store.managed_etcd.is_none() {
        return Ok(Look::default());
    }
    let name = cluster.name_any();
    let authority = get(etcd_authority_secret(&name)).await?;
    let member = get(etcd_member_secret(&name)).await?;
    let client = get(etcd_client_secret(&name)).await?;
    let certificates = certificates_of([authority.as_ref(), member.as_ref(), client.as_ref()])
        .renewed(Timestamp::now(), &certificate_names(cluster))
        .map_err(|error| Error::Etcd {
            what: "make certificates",
            reason: error.to_string(),
        })?;
    let states: Api<ConfigMap> = Api::namespaced(context.client.clone(), &namespace);
    let what = "read the state of etcd's members";
    let state = calls::ask(what, states.get_opt(&etcd_state(&name))).await?;
    let has_state = state.is_some();
    let state = State::of(&state.and_then(|state| state.data).unwrap_or_default());
    let mut world = World {
        established: state.established,
        places: places(cluster, seen),
        restart: cluster.annotations().get(RESTART).cloned(),
        alone: state.alone.clone(),
        ..World::default()
    };
    let links = connect(cluster, &certificates, memory, seen).await;
    let asked = ask(&links, &mut world).await;
    // Who does not answer may have gone without a word: the next question makes a new connection.
    let answers = |pod: &String| {
        let mut places = world.places.iter();
        places.any(|place| place.pod == *pod && place.said.is_some())
    };
    memory.etcd.links.retain(|pod, _| answers(pod));
    let defragmented = memory.etcd.defragmented.iter();
    world.defragmented = defragmented
        .map(|(pod, when)| (pod.clone(), when.elapsed().as_secs()))
        .collect();
    seen.etcd = Some(world);
    seen.certificates_renewed_at = certificates.renewed_at();
    let shown = certificates.client.as_ref().map(|pair| &pair.certificate);
    let trust = certificates.trusted();
    Ok(Look {
        certificates: shown.map(|shown| short_hash(&format!("{trust}{shown}"))),
        trust: Some(short_hash(&trust)),
        refused: None,
        managed: Some(Managed {
            certificates,
            has_state,
            state,
            pods: seen
                .pods_of(&etcd_set(&name))
                .into_values()
                .cloned()
                .collect(),
            asked,
            links,
        }),
    })
}

/// Of an etcd that exists the certificates are somebody else's.
fn given(name: &str, secret: Option<&Secret>) -> Look {
    let data = secret.and_then(|secret| secret.data.as_ref());
    let refuse = |message: String| Look {
        refused: Some(Refusal {
            reason: "SecretMissing",
            message,
        }),
        ..Look::default()
    };
    let Some(data) = data else {
        return refuse(format!(
            "metadataStore.etcd.tls: there is no secret {name:?}"
        ));
    };
    if !data.contains_key("ca.crt") {
        return refuse(format!(
            "metadataStore.etcd.tls: secret {name:?} has no ca.crt"
        ));
    }
    if data.contains_key("tls.crt") != data.contains_key("tls.key") {
        return refuse(format!(
            "metadataStore.etcd.tls: secret {name:?} has one of tls.crt and tls.key"
        ));
    }
    let read = |key: &str| data.get(key).map(|value| String::from_utf8_lossy(&value.0));
    let all = ["ca.crt", "tls.crt", "tls.key"].map(|key| read(key).unwrap_or_default());
    Look {
        certificates: Some(short_hash(&all.concat())),
        ..Look::default()
    }
}

fn places(cluster: &HitherCluster, seen: &Seen) -> Vec<Place> {
    let pods = seen.pods_of(&etcd_set(&cluster.name_any()));
    let domain = peers_domain(cluster);
    let now = Timestamp::now();
    let one = |(at, name): (usize, String)| {
        let pod = i32::try_from(at).ok().and_then(|at| pods.get(&at));
        let place = Place {
            peer: peer_url(&name, &domain),
            pod: name,
            ..Place::default()
        };
        pod.map_or_else(|| place.clone(), |pod| told_by(pod, now, place.clone()))
    };
    let names = member_names(&cluster.name_any());
    names.into_iter().enumerate().map(one).collect()
}

/// What the pod has told of its data, and whether it was let in since.
fn told_by(pod: &Pod, now: Timestamp, place: Place) -> Place {
    let since = |at: Timestamp| u64::try_from(now.duration_since(at).as_secs()).unwrap_or(0);
    let status = pod.status.as_ref();
    let admission = status.and_then(|status| status.init_container_statuses.as_ref()?.first());
    let ended = |state: Option<&ContainerState>| state.and_then(|state| state.terminated.clone());
    let last = ended(admission.and_then(|admission| admission.state.as_ref()));
    let before = ended(admission.and_then(|admission| admission.last_state.as_ref()));
    let ends = pod.metadata.deletion_timestamp.as_ref();
    if let Some(let_in) = last.as_ref().filter(|last| last.exit_code == 0) {
        // A pod that ends is not what its etcd will be.
        if let Some(ends) = ends {
            return Place {
                away_seconds: Some(since(ends.0)),
                ..place
            };
        }
        let member = match let_in.message.as_deref().and_then(Message::of) {
            Some(Message::LetIn { member }) => member,
            _ => None,
        };
        let seconds = let_in.finished_at.as_ref().map_or(0, |at| since(at.0));
        return Place {
            let_in: Some(LetIn { member, seconds }),
            ..place
        };
    }
    let told = [last, before].into_iter().flatten().find_map(|ended| {
        match Message::of(&ended.message?)? {
            Message::NoData { lost, .. } => Some(lost),
            Message::LetIn { .. } => None,
        }
    });
    if let Some(lost) = told {
        return Place {
            waits: true,
            lost,
            ..place
        };
    }
    let begun = ends.or(pod.metadata.creation_timestamp.as_ref());
    Place {
        away_seconds: begun.map(|at| since(at.0)),
        ..place
    }
}

/// A connection to the etcd of each pod in which one runs.
async fn connect(
    cluster: &HitherCluster,
    certificates: &Certificates,
    memory: &mut Memory,
    seen: &Seen,
) -> BTreeMap<String, Link> {
    let Some(client) = &certificates.client else {
        return BTreeMap::new();
    };
    let credentials = Credentials {
        trusted: certificates.trusted().into_bytes(),
        certificate: client.certificate.clone().into_bytes(),
        key: client.key.clone().into_bytes(),
    };
    if memory.etcd.credentials.as_ref() != Some(&credentials) {
        memory.etcd.links.clear();
        memory.etcd.credentials = Some(credentials.clone());
    }
    let mut links = BTreeMap::new();
    let pods = seen.pods_of(&etcd_set(&cluster.name_any()));
    for pod in pods.into_values().filter(|pod| container_runs(pod, "etcd")) {
        let ip = pod.status.as_ref().and_then(|status| status.pod_ip.clone());
        let Some(ip) = ip else { continue };
        let name = pod.name_any();
        let link = match memory.etcd.links.remove(&name) {
            Some((same, link)) if same == ip => Ok(link),
            _ => {
                let host = if ip.contains(':') {
                    format!("[{ip}]")
                } else {
                    ip.clone()
                };
                let peer = Peer {
                    url: format!("https://{host}:{CLIENT_PORT}"),
                    server_name: Some(members_host(cluster)),
                };
                Link::to(&peer, &credentials).await
            }
        };
        match link {
            Ok(link) => drop(links.insert(name, (ip, link))),
            Err(error) => tracing::warn!(%error, pod = name, "no connection"),
        }
    }
    memory.etcd.links = links.clone();
    links
        .into_iter()
        .map(|(pod, (_, link))| (pod, link))
        .collect()
}

/// Asks all members; the link of one that has a quorum behind it.
async fn ask(links: &BTreeMap<String, Link>, world: &mut World) -> Option<Link> {
    let each = links.iter().map(async |(pod, link)| {
        let said = link.said().await;
        if let Err(error) = &said {
            tracing::debug!(%error, pod, "no answer");
        }
        (pod.clone(), said.ok())
    });
    let said: BTreeMap<String, Option<Said>> = join_all(each).await.into_iter().collect();
    for place in &mut world.places {
        place.said = said.get(&place.pod).cloned().flatten();
        if let Some(said) = &mut place.said
            && said.quota_bytes == 0
        {
            said.quota_bytes = i64::try_from(QUOTA_BYTES).unwrap_or(i64::MAX);
        }
    }
    let answering = links
        .iter()
        .filter(|(pod, _)| said.get(*pod).is_some_and(Option::is_some));
    let lists = join_all(answering.map(async |(_, link)| (link, link.members().await.ok()))).await;
    let (link, members) = lists
        .into_iter()
        .find_map(|(link, members)| Some((link, members?)))?;
    match link.full().await {
        Ok(full) => world.full = !full.is_empty(),
        Err(error) => tracing::warn!(%error, "etcd does not say whether it is full"),
    }
    world.members = Some(members);
    Some(link.clone())
}

/// Makes what the members need before they start.
pub(super) async fn prepare(
    context: &Context,
    cluster: &HitherCluster,
    look: &Look,
    memory: &mut Memory,
) -> Result<(), Error> {
    let Some(managed) = &look.managed else {
        return Ok(());
    };
    for secret in certificate_secrets(cluster, &managed.certificates) {
        context.apply(&secret, memory).await?;
    }
    if !managed.has_state {
        let state = etcd_state_object(cluster, &managed.state);
        context.apply(&state, memory).await?;
    }
    Ok(())
}

/// Does the one thing that was decided.
pub(super) async fn step(
    context: &Context,
    cluster: &HitherCluster,
    look: &Look,
    plan: &Plan,
    memory: &mut Memory,
) -> Result<(), Error> {
    let Some(managed) = &look.managed else {
        return Ok(());
    };
    if managed.asked.is_some() && cluster.annotations().contains_key(RESTART) {
        // It would take effect the next time the quorum is lost, when nobody means it any more.
        unasked(context, cluster).await?;
    }
    let Some(step) = &plan.step else {
        return Ok(());
    };
    if context.lease.left().is_none() {
        return Err(Error::NotLeader);
    }
    let record = State {
        established: true,
        ..managed.state.clone()
    };
    let done = match step {
        Step::Establish => {
            let state = etcd_state_object(cluster, &record);
            context.apply(&state, memory).await?;
            true
        }
        Step::Restart(pod) => {
            let state = State {
                alone: Some(pod.clone()),
                round: record.round + 1,
                ..record
            };
            let state = etcd_state_object(cluster, &state);
            context.apply(&state, memory).await?;
            for pod in &managed.pods {
                context.delete(pod).await?;
            }
            unasked(context, cluster).await?;
            true
        }
        Step::Settle(name) => {
            for pod in managed.pods.iter().filter(|pod| pod.name_any() == *name) {
                context.delete(pod).await?;
            }
            let state = State {
                alone: None,
                ..record
            };
            let state = etcd_state_object(cluster, &state);
            context.apply(&state, memory).await?;
            true
        }
        Step::Again(name) => {
            for pod in managed.pods.iter().filter(|pod| pod.name_any() == *name) {
                context.delete(pod).await?;
            }
            true
        }
        of_member => change(managed, of_member, memory).await?,
    };
    if done {
        let (reason, text) = told(step, plan);
        context
            .event(cluster, EventType::Normal, reason, "MetadataStore", &text)
            .await;
    }
    Ok(())
}

/// A step that etcd itself takes; false if it is too early.
async fn change(managed: &Managed, step: &Step, memory: &mut Memory) -> Result<bool, Error> {
    let Some(asked) = &managed.asked else {
        return Ok(false);
    };
    let failed = |what| {
        move |error: AskError| Error::Etcd {
            what,
            reason: error.to_string(),
        }
    };
    match step {
        Step::Remove(id) => {
            let removed = asked.remove(*id).await;
            return removed.map_err(failed("remove a member"));
        }
        Step::AddLearner(peer) => {
            let added = asked.add_learner(peer.clone()).await;
            return added.map_err(failed("add a member"));
        }
        Step::Promote(id) => {
            let voted = asked.promote(*id).await;
            return voted.map_err(failed("give a member its vote"));
        }
        Step::Defragment(pod) => {
            let Some(link) = managed.links.get(pod) else {
                return Ok(false);
            };
            memory.etcd.defragmented.insert(pod.clone(), Instant::now());
            link.defragment()
                .await
                .map_err(failed("make a file smaller"))?;
        }
        Step::Disarm => asked
            .disarm()
            .await
            .map_err(failed("let etcd take changes"))?,
        Step::Establish | Step::Restart(_) | Step::Settle(_) | Step::Again(_) => return Ok(false),
    }
    Ok(true)
}

/// Takes back what was asked for by annotation.
async fn unasked(context: &Context, cluster: &HitherCluster) -> Result<(), Error> {
    let namespace = cluster.namespace().unwrap_or_default();
    let api: Api<HitherCluster> = Api::namespaced(context.client.clone(), &namespace);
    let patch = Patch::Merge(json!({"metadata": {"annotations": {RESTART: null}}}));
    let (name, params) = (cluster.name_any(), PatchParams::default());
    let what = format!("take the annotation {RESTART} off");
    let patched = context.change(what, api.patch(&name, &params, &patch));
    patched.await.map(|_| ())
}

/// A step as an event: its reason and its text.
fn told(step: &Step, plan: &Plan) -> (&'static str, String) {
    let why = plan.waiting.clone().unwrap_or_default();
    match step {
        Step::Establish => ("MetadataMembersBegan", why),
        Step::Restart(pod) => (
            "MetadataRestarted",
            format!("{pod} goes on without the others"),
        ),
        Step::Settle(_) => ("MetadataSettled", why),
        Step::Again(_) => ("MetadataMemberRestarted", why),
        Step::Remove(_) => ("MetadataMemberRemoved", why),
        Step::AddLearner(_) => ("MetadataMemberAdded", why),
        Step::Promote(_) => ("MetadataMemberVotes", why),
        Step::Defragment(pod) => (
            "MetadataDefragmented",
            format!("the file of {pod} was made smaller"),
        ),
        Step::Disarm => ("MetadataWritable", "etcd takes changes again".into()),
    }
}

/// Annotation of a cluster: the member to go on from without the others.
const RESTART: &str = "hither.dev/restart-etcd-from";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const CREATED: &str = "2026-11-30T21:57:01Z";

    fn pod(state: &serde_json::Value, last: &serde_json::Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "e-0", "creationTimestamp": CREATED},
            "status": {"initContainerStatuses": [{
                "name": "admission", "image": "", "imageID": "", "ready": false, "restartCount": 1,
                "state": state, "lastState": last,
            }]},
        }))
        .unwrap()
    }

    fn told(pod: &Pod) -> Place {
        let now = CREATED.parse::<Timestamp>().unwrap() + jiff::SignedDuration::from_secs(60);
        told_by(pod, now, Place::default())
    }

    #[test]
    fn who_told_that_it_has_no_data_waits_until_it_is_let_in() {
        let no_data = |lost| {
            let why = "x".into();
            let message = Message::NoData { lost, why }.to_string();
            json!({"terminated": {"exitCode": 1, "message": message}})
        };
        let (said, other) = (
            no_data(None),
            json!({"terminated": {"exitCode": 1, "message": "read: no such file"}}),
        );
        let runs = json!({"running": {}});
        let waits = Place {
            waits: true,
            ..Place::default()
        };
        assert_eq!(told(&pod(&said, &json!({}))), waits);
        assert_eq!(told(&pod(&runs, &said)), waits);
        assert_eq!(told(&pod(&json!({"waiting": {}}), &said)), waits);
        // The newer message counts.
        assert_eq!(told(&pod(&no_data(Some(9)), &said)).lost, Some(9));
        let away = Place {
            away_seconds: Some(60),
            ..Place::default()
        };
        assert_eq!(told(&pod(&runs, &json!({}))), away);
        assert_eq!(told(&pod(&runs, &other)), away);
        assert_eq!(told(&Pod::default()), Place::default());
    }

    #[test]
    fn who_was_let_in_said_as_whom() {
        let no_data = json!({"terminated": {"exitCode": 1, "message": "this member has no data"}});
        for member in [None, Some(0x2963_5285_fc45_714a)] {
            let message = Message::LetIn { member }.to_string();
            let done = json!({"terminated": {
                "exitCode": 0, "message": message, "finishedAt": "2026-11-30T21:57:31Z",
            }});
            let mut pod = pod(&done, &no_data);
            let let_in = LetIn {
                member,
                seconds: 30,
            };
            assert_eq!(
                told(&pod),
                Place {
                    let_in: Some(let_in),
                    ..Place::default()
                }
            );
            let ends = serde_json::from_value(json!("2026-11-30T21:57:51Z")).unwrap();
            pod.metadata.deletion_timestamp = Some(ends);
            assert_eq!(
                told(&pod),
                Place {
                    away_seconds: Some(10),
                    ..Place::default()
                }
            );
        }
    }

    #[test]
    fn a_given_secret_is_checked_and_its_change_is_seen() {
        let secret = |data| -> Secret { serde_json::from_value(json!({"data": data})).unwrap() };
        let reason = |secret: Option<&Secret>| {
            let look = given("s", secret);
            look.refused.map(|refusal| refusal.message)
        };
        assert!(reason(None).unwrap().contains("no secret"));
        assert!(
            reason(Some(&secret(json!({"tls.crt": "YQ=="}))))
                .unwrap()
                .contains("no ca.crt")
        );
        let half = secret(json!({"ca.crt": "YQ==", "tls.crt": "YQ=="}));
        assert!(reason(Some(&half)).unwrap().contains("one of"));
        let (one, two) = (
            secret(json!({"ca.crt": "YQ=="})),
            secret(json!({"ca.crt": "Yg=="})),
        );
        assert_eq!(reason(Some(&one)), None);
        assert_ne!(
            given("s", Some(&one)).certificates,
            given("s", Some(&two)).certificates
        );
    }
}
