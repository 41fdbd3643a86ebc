//! Compiles the message descriptions without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "proto/common.proto",
        "proto/map.proto",
        "proto/manager.proto",
        "proto/meta.proto",
        "proto/chunk.proto",
        "proto/stored.proto",
    ];
    let descriptors = protox::compile(files, ["proto"])?;
    prost_build::Config::new()
        .bytes(["."])
        .compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
