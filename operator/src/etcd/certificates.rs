//! The authority of a managed etcd, and the certificates it gives to members and servers. Pure but
//! for the keys, which are random.

use jiff::Timestamp;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use time::OffsetDateTime;
use x509_parser::extensions::GeneralName;
use x509_parser::pem::parse_x509_pem;

/// A certificate and its key, both PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Pair {
    /// The certificate.
    pub certificate: String,
    /// Its key.
    pub key: String,
}

/// Shows no key.
impl std::fmt::Debug for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pair").finish_non_exhaustive()
    }
}

/// All that is kept for one etcd.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Certificates {
    /// The authority that gives certificates now.
    pub authority: Option<Pair>,
    /// The one that will, known to everybody before it does.
    pub next: Option<Pair>,
    /// The one that did, as long as certificates of its may be in use.
    pub old: Option<String>,
    /// The members' certificate: towards other members and clients.
    pub member: Option<Pair>,
    /// The certificate of managers, metadata servers and the operator.
    pub client: Option<Pair>,
}

/// What the certificates say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    /// Common name of members: no other certificate is a member's.
    pub member: String,
    /// Common name of clients.
    pub client: String,
    /// Host names of members.
    pub hosts: Vec<String>,
}

impl Certificates {
    /// The authorities to trust, PEM.
    #[must_use]
    pub fn trusted(&self) -> String {
        let of = |pair: &Option<Pair>| pair.as_ref().map(|pair| pair.certificate.clone());
        let all = [of(&self.authority), of(&self.next), self.old.clone()];
        all.into_iter().flatten().collect()
    }

    /// When the first of the members' and servers' certificates is renewed.
    #[must_use]
    pub fn renewed_at(&self) -> Option<Timestamp> {
        let of = |pair: &Option<Pair>| {
            let life = Life::of(&pair.as_ref()?.certificate)?;
            Timestamp::from_second(life.part(RENEWED_AT)).ok()
        };
        of(&self.member).min(of(&self.client))
    }

    /// The same with what is missing, damaged or of two thirds of its life made anew.
    ///
    /// An authority is followed by another in steps: at two thirds of its life the next one is
    /// trusted by everybody, at five sixths it gives the certificates.
    ///
    /// # Errors
    /// When keys cannot be made.
    pub fn renewed(&self, now: Timestamp, names: &Names) -> Result<Self, rcgen::Error> {
        let now = now.as_second();
        let mut new = self.clone();
        let life = |pair: &Option<Pair>| usable(pair).and_then(|pair| Life::of(&pair.certificate));
        if life(&new.authority).is_none_or(|life| now >= life.end) {
            // Nothing that was given before counts.
            new = Self {
                authority: Some(authority(now, names)?),
                ..Self::default()
            };
        }
        if let Some(life) = life(&new.authority) {
            if now >= life.part(RENEWED_AT) && usable(&new.next).is_none() {
                new.next = Some(authority(now, names)?);
            }
            if now >= life.part(FOLLOWED_AT)
                && let Some(next) = new.next.take()
            {
                new.old = new.authority.replace(next).map(|pair| pair.certificate);
            }
        }
        let ended = |old: &String| Life::of(old).is_none_or(|life| now >= life.end);
        if new.old.as_ref().is_some_and(ended) {
            new.old = None;
        }
        let authority = new
            .authority
            .clone()
            .ok_or(rcgen::Error::CouldNotParseCertificate)?;
        let hosts = &names.hosts;
        if !is_good(&new.member, &authority, now, &names.member, hosts) {
            new.member = Some(leaf(&authority, now, &names.member, hosts)?);
        }
        if !is_good(&new.client, &authority, now, &names.client, &[]) {
            new.client = Some(leaf(&authority, now, &names.client, &[])?);
        }
        Ok(new)
    }
}

/// The time a certificate holds, in seconds since 1970.
#[derive(Debug, Clone, Copy)]
struct Life {
    begin: i64,
    end: i64,
}

impl Life {
    fn of(certificate: &str) -> Option<Self> {
        let (_, pem) = parse_x509_pem(certificate.as_bytes()).ok()?;
        let validity = pem.parse_x509().ok()?.validity().clone();
        Some(Self {
            begin: validity.not_before.timestamp(),
            end: validity.not_after.timestamp(),
        })
    }

    /// The moment at which a part of it, in sixths, is over.
    fn part(self, sixths: i64) -> i64 {
        self.begin + (self.end - self.begin) / 6 * sixths
    }
}

/// A pair that can be read.
fn usable(pair: &Option<Pair>) -> Option<&Pair> {
    let pair = pair.as_ref()?;
    Life::of(&pair.certificate)?;
    KeyPair::from_pem(&pair.key).ok()?;
    Some(pair)
}

fn is_good(pair: &Option<Pair>, authority: &Pair, now: i64, name: &str, hosts: &[String]) -> bool {
    let Some(pair) = usable(pair) else {
        return false;
    };
    let read = |text: &str| parse_x509_pem(text.as_bytes()).ok().map(|(_, pem)| pem);
    let (Some(pem), Some(authority)) = (read(&pair.certificate), read(&authority.certificate))
    else {
        return false;
    };
    let (Ok(certificate), Ok(authority)) = (pem.parse_x509(), authority.parse_x509()) else {
        return false;
    };
    let is_named = certificate
        .subject()
        .iter_common_name()
        .any(|known| known.as_str() == Ok(name));
    let mut known: Vec<&str> = Vec::new();
    if let Ok(Some(names)) = certificate.subject_alternative_name() {
        known.extend(
            names
                .value
                .general_names
                .iter()
                .filter_map(|name| match name {
                    GeneralName::DNSName(name) => Some(*name),
                    _ => None,
                }),
        );
    }
    let life = Life::of(&pair.certificate);
    life.is_some_and(|life| now < life.part(RENEWED_AT))
        && certificate.issuer() == authority.subject()
        && is_named
        && known == hosts.iter().map(String::as_str).collect::<Vec<_>>()
}

fn authority(now: i64, names: &Names) -> Result<Pair, rcgen::Error> {
    let key = KeyPair::generate()?;
    // Certificates name their authority: no two have the same name.
    let name = format!("{} authority {:08x}", names.member, rand::random::<u32>());
    let mut params = params(now, AUTHORITY_LIFE, &name, &[])?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(Pair {
        certificate: params.self_signed(&key)?.pem(),
        key: key.serialize_pem(),
    })
}

fn leaf(authority: &Pair, now: i64, name: &str, hosts: &[String]) -> Result<Pair, rcgen::Error> {
    let issuer =
        Issuer::from_ca_cert_pem(&authority.certificate, KeyPair::from_pem(&authority.key)?)?;
    let key = KeyPair::generate()?;
    let mut params = params(now, LEAF_LIFE, name, hosts)?;
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    if !hosts.is_empty() {
        params
            .extended_key_usages
            .push(ExtendedKeyUsagePurpose::ServerAuth);
    }
    Ok(Pair {
        certificate: params.signed_by(&key, &issuer)?.pem(),
        key: key.serialize_pem(),
    })
}

fn params(
    now: i64,
    life: i64,
    name: &str,
    hosts: &[String],
) -> Result<CertificateParams, rcgen::Error> {
    let at = |seconds| {
        OffsetDateTime::from_unix_timestamp(seconds)
            .map_err(|_| rcgen::Error::CouldNotParseCertificate)
    };
    let mut params = CertificateParams::new(hosts)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    // Clocks differ.
    params.not_before = at(now - EARLIER)?;
    params.not_after = at(now + life)?;
    Ok(params)
}

const DAY: i64 = 24 * 3600;
/// Seconds an authority's certificate holds.
const AUTHORITY_LIFE: i64 = 3650 * DAY;
/// Seconds the certificates of members and servers hold.
const LEAF_LIFE: i64 = 365 * DAY;
/// They hold from so many seconds before they were made.
const EARLIER: i64 = 3600;
/// Sixths of its life after which a certificate is renewed: two thirds.
const RENEWED_AT: i64 = 4;
/// Sixths of an authority's life after which the next one takes over.
const FOLLOWED_AT: i64 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Names {
        Names {
            member: "demo-etcd".into(),
            client: "demo-etcd-client".into(),
            hosts: vec!["*.peers.files.svc".into(), "demo-etcd.files.svc".into()],
        }
    }

    fn after(stored: &Certificates, days: i64) -> Certificates {
        let now = Timestamp::from_second(BEGIN + days * DAY).unwrap();
        stored.renewed(now, &names()).unwrap()
    }

    /// Whether TLS would take the certificate.
    fn holds(certificates: &Certificates, leaf: &Pair) -> bool {
        let trusted = certificates.trusted();
        let (_, leaf) = parse_x509_pem(leaf.certificate.as_bytes()).unwrap();
        let leaf = leaf.parse_x509().unwrap();
        x509_parser::pem::Pem::iter_from_buffer(trusted.as_bytes()).any(|pem| {
            let pem = pem.unwrap();
            let authority = pem.parse_x509().unwrap();
            authority.subject() == leaf.issuer()
                && leaf.verify_signature(Some(authority.public_key())).is_ok()
        })
    }

    #[test]
    fn what_holds_is_kept() {
        let first = after(&Certificates::default(), 0);
        assert!(holds(&first, first.member.as_ref().unwrap()));
        assert!(holds(&first, first.client.as_ref().unwrap()));
        assert_eq!(after(&first, 0), first);
        assert_eq!(after(&first, 243), first);
    }

    #[test]
    fn certificates_are_renewed_at_two_thirds_of_their_life() {
        let first = after(&Certificates::default(), 0);
        let second = after(&first, 244);
        assert_ne!(second.member, first.member);
        assert_ne!(second.client, first.client);
        assert_eq!(second.authority, first.authority);
        assert_eq!(first.renewed_at().unwrap().as_second(), {
            let life = Life::of(&first.client.as_ref().unwrap().certificate).unwrap();
            life.begin + (life.end - life.begin) / 6 * 4
        });
    }

    #[test]
    fn a_new_authority_is_trusted_before_it_gives_certificates() {
        let first = after(&Certificates::default(), 0);
        let known = after(&first, 2434);
        assert!(known.next.is_some());
        assert_eq!(known.authority, first.authority);
        assert!(holds(&known, known.member.as_ref().unwrap()));
        let followed = after(&known, 3042);
        assert_eq!(followed.authority, known.next);
        assert_eq!(followed.next, None);
        assert!(holds(&followed, followed.member.as_ref().unwrap()));
        // Those that still show the old one's are trusted, and those that know both trust the new.
        assert!(holds(&followed, known.client.as_ref().unwrap()));
        assert!(holds(&known, followed.client.as_ref().unwrap()));
        let without = after(&followed, 3651);
        assert_eq!(without.old, None);
        assert_eq!(without.authority, followed.authority);
    }

    #[test]
    fn what_is_damaged_or_says_something_else_is_made_anew() {
        let first = after(&Certificates::default(), 0);
        let mut damaged = first.clone();
        damaged.client.as_mut().unwrap().key = "x".into();
        let repaired = after(&damaged, 1);
        assert_ne!(repaired.client, damaged.client);
        assert_eq!(repaired.member, first.member);
        let now = Timestamp::from_second(BEGIN).unwrap();
        let mut elsewhere = names();
        elsewhere.hosts.push("more".into());
        assert_ne!(first.renewed(now, &elsewhere).unwrap().member, first.member);
        let mut lost = first.clone();
        lost.authority = None;
        let begun = after(&lost, 0);
        assert!(holds(&begun, begun.member.as_ref().unwrap()));
        assert!(!holds(&begun, first.member.as_ref().unwrap()));
    }

    #[test]
    fn keys_are_not_shown() {
        let text = format!("{:?}", after(&Certificates::default(), 0));
        assert!(!text.contains("PRIVATE"), "{text}");
    }

    const BEGIN: i64 = 1_800_000_000;
}
