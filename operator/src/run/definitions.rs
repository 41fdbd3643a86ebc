//! The custom resource definitions: Helm installs them once, the operator keeps them up to date.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::Patch;
use kube::{Api, Client, ResourceExt as _};

use super::apply::params;
use super::calls::ask;
use super::lease::Lease;
use crate::api::definitions;
use crate::error::Error;

/// Brings the definitions to those of this program, unless a newer one has been here. Fields the
/// API server does not know it drops without a word, so what fails is told, and all goes on.
pub(super) async fn update(client: &Client, lease: &Lease) {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in definitions() {
        let name = definition.name_any();
        match bring(&api, lease, definition).await {
            Ok(()) => {}
            Err(error) => tracing::warn!(
                name, %error,
                "the definition may be an old one: apply those of charts/hither/crds by hand"
            ),
        }
    }
}

async fn bring(
    api: &Api<CustomResourceDefinition>,
    lease: &Lease,
    mut definition: CustomResourceDefinition,
) -> Result<(), Error> {
    let name = definition.name_any();
    let there = ask(format!("look at {name}"), api.get_metadata(&name)).await?;
    let by = there.annotations().get(VERSION).map(String::as_str);
    if is_newer(by, OWN) {
        tracing::info!(name, by, "the definition is a newer operator's");
        return Ok(());
    }
    let own = (VERSION.to_owned(), OWN.to_owned());
    definition.annotations_mut().extend([own]);
    let (params, patch) = (params(), Patch::Apply(&definition));
    let what = format!("update {name}");
    lease
        .change(what, api.patch(&name, &params, &patch))
        .await?;
    Ok(())
}

/// Whether a version is newer than another; what is none is older.
fn is_newer(there: Option<&str>, own: &str) -> bool {
    let numbers = |text: &str| -> Option<Vec<u64>> {
        let release = text.split(['-', '+']).next()?;
        release.split('.').map(|one| one.parse().ok()).collect()
    };
    there.and_then(numbers) > numbers(own)
}

/// Annotation with the version of the operator that wrote a definition.
const VERSION: &str = "hither.dev/operator-version";
const OWN: &str = env!("CARGO_PKG_VERSION");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_is_never_made_older() {
        assert!(is_newer(Some("0.10.0"), "0.9.3"));
        assert!(is_newer(Some("1.0.0-rc.1"), "0.9.3"));
        for not in [
            Some("0.9.3"),
            Some("0.9.2"),
            Some("unknown"),
            Some(""),
            None,
        ] {
            assert!(!is_newer(not, "0.9.3"), "{not:?}");
        }
    }
}
