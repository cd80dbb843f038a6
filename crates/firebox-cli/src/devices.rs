//! `firebox cards` and `firebox gpus`.

use firebox::Bytes;
use firebox::dry::Card;
use firebox::plan::rates_of;
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use serde::Serialize;
use serde_json::json;

use crate::table::table;

/// `firebox cards`.
pub fn cards(as_json: bool) -> anyhow::Result<()> {
    if as_json {
        let cards = Card::all().iter().map(|card| {
            json!({
                "name": card.name(),
                "memory": card.memory(),
                "capability": card.capability().to_string(),
                "multiprocessors": card.multiprocessors(),
                "flops": rates_of(card).map(|rates| rates.flops),
                "bandwidth": rates_of(card).map(|rates| rates.bandwidth),
                "largest_buffer_on_burns_pools": card.largest_buffer(),
            })
        });
        let cards: serde_json::Value = cards.collect();
        println!("{}", serde_json::to_string_pretty(&cards)?);
        return Ok(());
    }
    let mut table =
        table(["card", "memory", "capability", "multiprocessors", "Tflop/s", "GB/s"], 1..6);
    for card in Card::all() {
        let rates = rates_of(card);
        let shown = |number: Option<f64>, digits: usize| {
            number.map_or("-".to_owned(), |number| format!("{number:.digits$}"))
        };
        table.add_row([
            card.name().to_owned(),
            card.memory().to_string(),
            card.capability().to_string(),
            card.multiprocessors().to_string(),
            shown(rates.map(|rates| rates.flops / 1e12), 1),
            shown(rates.map(|rates| rates.bandwidth / 1e9), 0),
        ]);
    }
    println!("{table}");
    Ok(())
}

/// A GPU of this machine.
#[derive(Serialize)]
struct Gpu {
    number: u32,
    name: String,
    total: Bytes,
    free: Bytes,
    processes: Vec<Process>,
}

/// A process that uses it.
#[derive(Serialize)]
struct Process {
    pid: u32,
    /// `None` if the driver does not tell.
    name: Option<String>,
    bytes: Option<Bytes>,
}

/// `firebox gpus`.
pub fn gpus(as_json: bool) -> anyhow::Result<()> {
    let (found, why_none) = match Nvml::init().and_then(|nvml| found(&nvml)) {
        Ok(gpus) => (gpus, None),
        Err(NvmlError::LibloadingError(_)) => (Vec::new(), Some("it has no driver".to_owned())),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    if as_json {
        println!(
            "{}",
            serde_json::to_string_pretty(&json!({ "gpus": found, "message": why_none }))?
        );
        return Ok(());
    }
    if found.is_empty() {
        let why = why_none.map(|why| format!(": {why}")).unwrap_or_default();
        println!("no NVIDIA GPU can be used in this machine{why}");
        return Ok(());
    }
    for gpu in found {
        println!("{}: {}, {} of {} free", gpu.number, gpu.name, gpu.free, gpu.total);
        for Process { pid, name, bytes } in gpu.processes {
            let bytes = bytes.map_or("unknown".to_owned(), |bytes| bytes.to_string());
            println!("  {bytes:>12}  {pid:>7}  {}", name.unwrap_or_default());
        }
    }
    Ok(())
}

fn found(nvml: &Nvml) -> Result<Vec<Gpu>, NvmlError> {
    let gpu = |number: u32| {
        let device = nvml.device_by_index(number)?;
        let memory = device.memory_info()?;
        let mut running = device.running_compute_processes()?;
        running.extend(device.running_graphics_processes().unwrap_or_default());
        running.sort_by_key(|process| process.pid);
        running.dedup_by_key(|process| process.pid);
        let processes = running.iter().map(|process| Process {
            pid: process.pid,
            name: nvml.sys_process_name(process.pid, 256).ok(),
            bytes: match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(Bytes::new(bytes)),
                UsedGpuMemory::Unavailable => None,
            },
        });
        Ok(Gpu {
            number,
            name: device.name()?,
            total: Bytes::new(memory.total),
            free: Bytes::new(memory.free),
            processes: processes.collect(),
        })
    };
    (0..nvml.device_count()?).map(gpu).collect()
}
