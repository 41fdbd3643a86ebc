//! The custom resource definitions as YAML.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

use crate::api::definitions;

/// One definition as YAML.
///
/// # Errors
/// Never for the definitions of this crate.
pub fn yaml(definition: &CustomResourceDefinition) -> Result<String, serde_saphyr::ser::Error> {
    let mut text =
        "# Made by `hither-operator crds`; the types are in operator/src/api.\n".to_owned();
    text.push_str(&serde_saphyr::to_string(definition)?);
    Ok(text)
}

/// File name and YAML of every definition.
///
/// # Errors
/// Never for the definitions of this crate.
pub fn files() -> Result<Vec<(String, String)>, serde_saphyr::ser::Error> {
    let one = |definition: &CustomResourceDefinition| {
        let name = definition.metadata.name.clone().unwrap_or_default();
        Ok((format!("{name}.yaml"), yaml(definition)?))
    };
    definitions().iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// `UPDATE=1 cargo test -p hither-operator crds` writes them anew.
    #[test]
    fn the_committed_files_are_those_of_the_types() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for directory in ["crds", "charts/hither/crds"] {
            for (name, yaml) in files().unwrap() {
                let path = root.join(directory).join(name);
                if std::env::var_os("UPDATE").is_some() {
                    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                    std::fs::write(&path, &yaml).unwrap();
                }
                let committed = std::fs::read_to_string(&path).unwrap_or_default();
                assert_eq!(committed, yaml, "{}", path.display());
            }
        }
    }
}
