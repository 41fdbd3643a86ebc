//! How far apart servers and clients are, and the order in which servers are listed.

use std::collections::BTreeMap;

use crate::candidate::{ServerKey, mix};

/// A distance; smaller is nearer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Distance(pub u32);

impl Distance {
    /// On the same machine.
    pub const SAME_HOST: Self = Self(0);
    /// In the same zone.
    pub const SAME_ZONE: Self = Self(10);
    /// In another zone of the same region, unless the table says otherwise.
    pub const SAME_REGION: Self = Self(100);
    /// Elsewhere, or at an unknown place, unless the table says otherwise.
    pub const FAR: Self = Self(1000);
}

/// Where a server or a client stands. What is unknown is `None`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Site {
    /// Name or address of the machine.
    pub host: Option<String>,
    /// Zone.
    pub zone: Option<String>,
    /// Region.
    pub region: Option<String>,
    /// Location, in a cluster that is divided into locations.
    pub location: Option<String>,
}

/// Distances between zones. Without an entry, two zones are as far apart as their regions say.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DistanceTable {
    between: BTreeMap<(String, String), Distance>,
}

impl DistanceTable {
    /// Sets the distance between two zones, in both directions.
    pub fn set(&mut self, one: &str, other: &str, distance: Distance) {
        self.between.insert(pair(one, other), distance);
    }

    /// The distance between two places.
    #[must_use]
    pub fn distance(&self, one: &Site, other: &Site) -> Distance {
        if is_same(one.host.as_ref(), other.host.as_ref()) {
            return Distance::SAME_HOST;
        }
        if is_same(one.zone.as_ref(), other.zone.as_ref()) {
            return Distance::SAME_ZONE;
        }
        if let (Some(one), Some(other)) = (&one.zone, &other.zone)
            && let Some(distance) = self.between.get(&pair(one, other))
        {
            return *distance;
        }
        if is_same(one.region.as_ref(), other.region.as_ref()) {
            return Distance::SAME_REGION;
        }
        Distance::FAR
    }
}

/// A server to be listed to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedServer {
    /// Identity.
    pub key: ServerKey,
    /// Where it stands.
    pub site: Site,
}

/// The order in which servers are listed to a client, as indices: the client's own location first,
/// then by distance; equally distant ones are shuffled by the seed.
///
/// Without a location of its own the client sees all servers as in its location. One seed gives
/// one order whatever the order of the input.
#[must_use]
pub fn server_order(
    client: &Site,
    servers: &[ListedServer],
    table: &DistanceTable,
    seed: u64,
) -> Vec<usize> {
    let mut order: Vec<usize> = (0..servers.len()).collect();
    order.sort_by_cached_key(|index| {
        let server = &servers[*index];
        let is_elsewhere = client.location.is_some() && client.location != server.site.location;
        let distance = table.distance(client, &server.site);
        (is_elsewhere, distance, mix(seed, server.key.0), server.key)
    });
    order
}

fn pair(one: &str, other: &str) -> (String, String) {
    let (low, high) = if one <= other {
        (one, other)
    } else {
        (other, one)
    };
    (low.to_owned(), high.to_owned())
}

fn is_same(one: Option<&String>, other: Option<&String>) -> bool {
    one.is_some() && one == other
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn site(host: &str, zone: &str, region: &str) -> Site {
        let known = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        Site {
            host: known(host),
            zone: known(zone),
            region: known(region),
            location: None,
        }
    }

    fn listed(key: u64, site: Site) -> ListedServer {
        ListedServer {
            key: ServerKey(key),
            site,
        }
    }

    #[test]
    fn distances_follow_host_zone_table_region() {
        let mut table = DistanceTable::default();
        table.set("c", "a", Distance(7));
        let own = site("h", "a", "r");
        for (other, distance) in [
            (site("h", "b", "q"), Distance::SAME_HOST),
            (site("i", "a", "q"), Distance::SAME_ZONE),
            (site("i", "c", "q"), Distance(7)),
            (site("i", "b", "r"), Distance::SAME_REGION),
            (site("i", "b", "q"), Distance::FAR),
            (site("", "", ""), Distance::FAR),
        ] {
            assert_eq!(table.distance(&own, &other), distance, "{other:?}");
            assert_eq!(table.distance(&other, &own), distance, "{other:?}");
        }
        // Two unknown places are not the same place.
        assert_eq!(
            table.distance(&Site::default(), &Site::default()),
            Distance::FAR
        );
    }

    #[test]
    fn the_own_location_comes_before_a_nearer_server() {
        let in_location = |site: Site, location: &str| Site {
            location: Some(location.to_owned()),
            ..site
        };
        let client = in_location(site("h", "a", "r"), "L");
        let servers = [
            listed(1, in_location(site("h", "a", "r"), "M")),
            listed(2, in_location(site("i", "b", "q"), "L")),
            listed(3, in_location(site("j", "a", "r"), "L")),
        ];
        let order = server_order(&client, &servers, &DistanceTable::default(), 1);
        assert_eq!(order, [2, 1, 0]);
        // A client without a location goes by distance alone.
        let order = server_order(&site("h", "a", "r"), &servers, &DistanceTable::default(), 1);
        assert_eq!(order, [0, 2, 1]);
    }

    #[test]
    fn equal_distances_are_shuffled_by_the_seed() {
        let servers: Vec<ListedServer> =
            (0..4).map(|key| listed(key, site("", "a", "r"))).collect();
        let client = site("", "a", "r");
        let mut firsts = [0; 4];
        for seed in 0..400 {
            let order = server_order(&client, &servers, &DistanceTable::default(), seed);
            firsts[order[0]] += 1;
        }
        assert!(firsts.iter().all(|count| *count > 60), "{firsts:?}");
    }

    proptest! {
        #[test]
        fn the_order_is_a_permutation_sorted_by_distance(
            zones in prop::collection::vec(0_usize..4, 0..12),
            seed: u64,
        ) {
            let names = ["a", "b", "c", "d"];
            let mut table = DistanceTable::default();
            table.set("a", "b", Distance(20));
            table.set("a", "c", Distance(30));
            let servers: Vec<ListedServer> = zones
                .iter()
                .zip(0..)
                .map(|(zone, key)| listed(key, site("", names[*zone], "r")))
                .collect();
            let client = site("", "a", "r");
            let order = server_order(&client, &servers, &table, seed);
            let mut indices = order.clone();
            indices.sort_unstable();
            prop_assert_eq!(indices, (0..servers.len()).collect::<Vec<_>>());
            let distance = |index: usize| table.distance(&client, &servers[index].site);
            prop_assert!(order.windows(2).all(|pair| distance(pair[0]) <= distance(pair[1])));
        }
    }
}
