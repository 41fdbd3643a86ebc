//! Compiles the service descriptions without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let descriptors = protox::compile(["proto/csi.proto", "proto/registration.proto"], ["proto"])?;
    // Messages that carry secrets get a Debug of their own (src/secret.rs): none is printed.
    let secret = [
        "CreateVolumeRequest",
        "DeleteVolumeRequest",
        "ValidateVolumeCapabilitiesRequest",
        "ControllerExpandVolumeRequest",
        "ControllerModifyVolumeRequest",
        "NodeStageVolumeRequest",
        "NodePublishVolumeRequest",
    ];
    let names: Vec<String> = secret.iter().map(|name| format!("csi.v1.{name}")).collect();
    tonic_prost_build::configure()
        .skip_debug(names)
        .btree_map(".")
        .compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
