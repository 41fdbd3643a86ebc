//! Every field of the custom resources as a page, from their schemas.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray,
};

use crate::api::definitions;

/// The page.
#[must_use]
pub fn page() -> String {
    let mut text = "# Fields of the custom resources\n\n\
        Made by `hither-operator fields` from operator/src/api. What the API server refuses stands \
        under the field.\n"
        .to_owned();
    for definition in definitions() {
        kind(&mut text, &definition);
    }
    text
}

fn kind(text: &mut String, definition: &CustomResourceDefinition) {
    let names = &definition.spec.names;
    let short = names.short_names.as_deref().unwrap_or_default().join(", ");
    text.push_str(&format!("\n## {} (`{short}`)\n", names.kind));
    for version in &definition.spec.versions {
        let schema = version
            .schema
            .as_ref()
            .and_then(|s| s.open_api_v3_schema.as_ref());
        let Some(schema) = schema else { continue };
        if let Some(description) = &schema.description {
            text.push_str(&format!("{}\n", one_line(description)));
        }
        rules(text, schema, "");
        text.push('\n');
        for part in ["spec", "status"] {
            let properties = schema.properties.as_ref();
            if let Some(part_schema) = properties.and_then(|all| all.get(part)) {
                fields(text, part, part_schema);
            }
        }
    }
}

fn fields(text: &mut String, path: &str, schema: &JSONSchemaProps) {
    rules(text, schema, "  ");
    let Some(properties) = &schema.properties else {
        return;
    };
    let required = schema.required.clone().unwrap_or_default();
    for (name, field) in properties {
        let items = match &field.items {
            Some(JSONSchemaPropsOrArray::Schema(items)) => Some(&**items),
            _ => None,
        };
        let dots = if items.is_some() { "[]" } else { "" };
        let here = format!("{path}.{name}{dots}");
        let mut notes = vec![shape(field, items)];
        if required.contains(name) && path.starts_with("spec") {
            notes.push("required".into());
        }
        let default = field.default.as_ref().map(|default| default.0.to_string());
        // An object's own fields say theirs.
        if let Some(default) = default.filter(|default| !default.starts_with(['{', '['])) {
            notes.push(format!("default {default}"));
        }
        let description = field
            .description
            .as_deref()
            .map(one_line)
            .unwrap_or_default();
        text.push_str(&format!(
            "- `{here}` ({}): {description}\n",
            notes.join(", ")
        ));
        if FOREIGN.contains(&name.as_str()) {
            continue;
        }
        if items.is_some() {
            rules(text, field, "  ");
        }
        fields(text, &here, items.unwrap_or(field));
    }
}

fn rules(text: &mut String, schema: &JSONSchemaProps, indent: &str) {
    for rule in schema.x_kubernetes_validations.iter().flatten() {
        let message = rule.message.as_deref().unwrap_or(&rule.rule);
        text.push_str(&format!("{indent}- {}\n", one_line(message)));
    }
}

fn shape(field: &JSONSchemaProps, items: Option<&JSONSchemaProps>) -> String {
    let of = items.unwrap_or(field);
    if let Some(values) = &of.enum_ {
        let values: Vec<String> = values.iter().map(|value| value.0.to_string()).collect();
        return values.join(" or ");
    }
    let mut shape = of.type_.clone().unwrap_or_else(|| "quantity".into());
    if items.is_some() {
        shape = format!("list of {shape}");
    }
    match (of.minimum, of.maximum) {
        (Some(least), Some(most)) => format!("{shape} {least} to {most}"),
        (Some(least), None) => format!("{shape}, {least} or more"),
        _ => shape,
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Fields whose types are Kubernetes' own.
const FOREIGN: [&str; 4] = ["conditions", "resources", "tolerations", "imagePullSecrets"];

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// `UPDATE=1 cargo test -p hither-operator` writes it anew.
    #[test]
    fn the_committed_page_is_that_of_the_types() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/kubernetes/fields.md");
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(&path, super::page()).unwrap();
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(committed, super::page());
    }

    #[test]
    fn every_field_says_what_it_is() {
        let page = super::page();
        let fields: Vec<&str> = page
            .lines()
            .filter(|line| line.starts_with("- `"))
            .collect();
        assert!(fields.len() > 100, "{}", fields.len());
        for field in fields {
            let (_, says) = field.split_once("): ").unwrap_or_default();
            assert!(says.len() > 5 && says.ends_with(['.', '`']), "{field}");
        }
    }
}
