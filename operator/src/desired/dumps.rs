//! Dumps of the metadata, at given times.

use k8s_openapi::api::batch::v1::{CronJob, CronJobSpec, JobSpec, JobTemplateSpec};
use k8s_openapi::api::core::v1::{
    Container, PersistentVolumeClaimVolumeSource, PodSpec, PodTemplateSpec, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;

use super::managers::manager_address;
use super::names::{Component, component_labels, dump_job, metadata, owner};
use super::pod::{container_security, pod_security, some};
use super::{Object, World};
use crate::api::HitherCluster;

pub(crate) fn objects(cluster: &HitherCluster, world: &World) -> Vec<Object> {
    let spec = &cluster.spec;
    let Some(dumps) = &spec.metadata_store.dumps else {
        return Vec::new();
    };
    let labels = component_labels(cluster, Component::Dump);
    let container = Container {
        name: "dump".into(),
        image: Some(spec.image.clone().unwrap_or(world.image.clone())),
        image_pull_policy: spec.image_pull_policy.clone(),
        command: Some(vec!["/usr/local/bin/hither".into()]),
        args: Some(vec![
            format!("--cluster={}", manager_address(cluster)),
            "meta".into(),
            "dump".into(),
            format!("--keep={}", dumps.keep),
            DIR.into(),
        ]),
        security_context: Some(container_security()),
        volume_mounts: Some(vec![VolumeMount {
            name: VOLUME.into(),
            mount_path: DIR.into(),
            ..VolumeMount::default()
        }]),
        ..Container::default()
    };
    let pod = PodSpec {
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        image_pull_secrets: some(spec.image_pull_secrets.clone()),
        restart_policy: Some("Never".into()),
        security_context: Some(pod_security()),
        containers: vec![container],
        volumes: Some(vec![Volume {
            name: VOLUME.into(),
            persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                claim_name: dumps.claim_name.clone(),
                ..PersistentVolumeClaimVolumeSource::default()
            }),
            ..Volume::default()
        }]),
        ..PodSpec::default()
    };
    let job = CronJob {
        metadata: metadata(
            cluster,
            dump_job(&cluster.name_any()),
            labels.clone(),
            owner(cluster),
        ),
        spec: Some(CronJobSpec {
            schedule: dumps.schedule.clone(),
            concurrency_policy: Some("Forbid".into()),
            successful_jobs_history_limit: Some(1),
            failed_jobs_history_limit: Some(1),
            job_template: JobTemplateSpec {
                spec: Some(JobSpec {
                    backoff_limit: Some(2),
                    active_deadline_seconds: Some(LONGEST),
                    template: PodTemplateSpec {
                        metadata: Some(ObjectMeta {
                            labels: Some(labels),
                            ..ObjectMeta::default()
                        }),
                        spec: Some(pod),
                    },
                    ..JobSpec::default()
                }),
                ..JobTemplateSpec::default()
            },
            ..CronJobSpec::default()
        }),
        ..CronJob::default()
    };
    vec![Object::new(&job)]
}

const VOLUME: &str = "dumps";
const DIR: &str = "/dumps";
/// Seconds a dump gets.
const LONGEST: i64 = 3600;
