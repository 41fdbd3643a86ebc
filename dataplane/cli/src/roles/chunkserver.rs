//! A chunkserver.

use anyhow::bail;
use hither_chunkserver::{ChunkServer, ChunkServerConfig};

use super::{
    Signals, addresses, announce, ending, raise_descriptor_limit, read_config, told_address,
};
use crate::args;
use crate::cluster::manager_addresses;

/// Runs until SIGTERM, or until it has to stop by itself.
pub(crate) async fn run(args: args::Chunkserver) -> anyhow::Result<()> {
    let mut config: ChunkServerConfig = read_config(args.config.as_deref())?;
    if !args.disks.is_empty() {
        config.disks = args.disks;
    }
    config.listen = args.listen.unwrap_or(config.listen);
    config.advertise = args.advertise.unwrap_or(config.advertise);
    config.zone = args.zone.unwrap_or(config.zone);
    config.region = args.region.unwrap_or(config.region);
    config.node = args.node.unwrap_or(config.node);
    config.name = args.name.unwrap_or(config.name);
    if let Some(managers) = &args.managers {
        config.managers = manager_addresses(managers)?;
    }
    if let Some(labels) = &args.labels {
        config.labels = addresses(labels);
    }
    if config.disks.is_empty() {
        bail!("where are the chunks kept? give --disk DIRECTORY, once for each disk");
    }
    if config.managers.is_empty() {
        bail!("where is the manager? give --managers HOST:PORT");
    }
    config.advertise = told_address(&config.listen, &config.advertise)?;
    raise_descriptor_limit();
    let server = ChunkServer::start(config).await?;
    // Who reads that it is ready may end it: as asked, and not where it stands.
    let mut signals = Signals::listen()?;
    announce(&format!(
        "chunkserver {} ready at {}",
        server.id(),
        server.address()
    ));
    let why = tokio::select! {
        () = signals.next() => None,
        why = server.stopped() => Some(why),
    };
    ending(server.shutdown(), true).await??;
    match why {
        Some(why) => Err(why.into()),
        None => Ok(()),
    }
}
