//! An object to apply.

use kube::Resource;
use kube::api::{ApiResource, DynamicObject};
use serde::Serialize;

/// An object to apply, with what one has to know of its kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Object {
    /// Its kind.
    pub resource: ApiResource,
    /// The fields the operator cares for, and no others.
    pub object: DynamicObject,
}

impl Object {
    /// From a typed object.
    pub(crate) fn new<K>(object: &K) -> Self
    where
        K: Resource<DynamicType = ()> + Serialize,
    {
        let object = serde_json::to_value(object)
            .and_then(serde_json::from_value)
            .expect("an object of a known kind is JSON with a type");
        Self {
            resource: ApiResource::erase::<K>(&()),
            object,
        }
    }

    /// `Kind/name`.
    #[must_use]
    pub fn title(&self) -> String {
        let name = self.object.metadata.name.as_deref().unwrap_or_default();
        format!("{}/{name}", self.resource.kind)
    }
}
