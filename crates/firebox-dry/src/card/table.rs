//! The table of cards, which `card.rs` searches by name. A row has the name, the memory in GiB, the
//! compute capability (major, minor), the number of multiprocessors, and what it computes in 32 bit
//! and moves in a second, in 10⁹.
//!
//! - *Capabilities* were checked against NVIDIA's page "CUDA GPU Compute Capability"
//!   (developer.nvidia.com/cuda-gpus). Those of the T4 and the A100 were checked against copies of
//!   it and against output of `deviceQuery`. Those of the RTX 3060 and 3070 were not checked.
//! - *Shared memory* follows from the capability, see [`Capability::shared_memory`].
//! - *Multiprocessors* are what `deviceQuery` or the driver printed on such a card, if a public
//!   issue has it. Otherwise they are the published CUDA cores divided by the cores of one
//!   multiprocessor (64 in capability 7.5, 128 in 8.6 and 8.9). This applies to the T4, the RTX
//!   3060 and the RTX 4070. Those of the RTX 3070, the RTX 3090, the A10, the L40S and the H100
//!   come from published specifications. The H200 was queried directly.
//! - *Operations* are the published cores times the boost clock times two, without tensor cores.
//!   *Bytes* are the width of the bus times its clock. Both were checked against descriptions of
//!   cards on public pages (sysrqmts.com, hmc-tech.com, topcpu.net, fpsbench.com, alldbin.com,
//!   glennklockwood.com), not against data sheets. Of the L4, some have 30.3 Tflop/s and others
//!   31.3. The A100, the H100 and the H200 are those with SXM sockets.
//! - *Memory* is what a CUDA program sees on Linux. It is less than the number on the box, since
//!   the driver and error correction keep some. The source is the "total capacity" in a PyTorch
//!   message, to a hundredth of a GiB, or the bytes that `deviceQuery` printed, as users have
//!   posted them in the public issues named next to the cards. Drivers differ by a few hundredths;
//!   of several numbers the lowest is used. Estimates are marked. For a card on the machine, ask
//!   the driver instead.

use std::sync::LazyLock;

use firebox_trace::Bytes;

use crate::card::{Capability, Card, Throughput};

fn card(
    name: &'static str,
    gib: f64,
    (major, minor): (u32, u32),
    multiprocessors: u32,
    (gflops, gigabytes): (u32, u32),
) -> Card {
    let memory = Bytes::gib(1).scale(gib);
    Card::new(name, memory, Capability::new(major, minor), multiprocessors)
        .with_throughput(Throughput { gflops, gigabytes })
}

pub(crate) static CARDS: LazyLock<Vec<Card>> = LazyLock::new(|| {
    vec![
        // Zheng-Chong/CatVTON#133.
        card("T4", 14.56, (7, 5), 40, (8_141, 320)),
        // Kunhao-Liu/StyleGaussian#12.
        card("RTX 3060 12GB", 11.75, (8, 6), 28, (12_740, 360)),
        // sshan-zhao/GASDA#19; akshitac8/OW-DETR#46 has 7.78.
        card("RTX 3070", 7.76, (8, 6), 46, (20_310, 448)),
        // GaoLii/DSP#10.
        card("RTX 3090", 23.70, (8, 6), 82, (35_580, 936)),
        // An estimate. nvidia-smi has 12,282 MiB (meta-llama/llama#466), of which a program sees
        // less.
        card("RTX 4070", 11.70, (8, 9), 46, (29_150, 504)),
        // pinokiofactory/flux-webui#11; ali-vilab/VGen#104 has 23.64. Multiprocessors:
        // pc2/GPUInspector.jl#11.
        card("RTX 4090", 23.61, (8, 9), 128, (82_580, 1008)),
        // TrajectoryCrafter/TrajectoryCrafter#20; Wan-Video/Wan2.1#465 has 31.37. deviceQuery has
        // 33,677,180,928 bytes and 170 multiprocessors in aikitoria/open-gpu-kernel-modules#1.
        card("RTX 5090", 31.36, (12, 0), 170, (104_800, 1792)),
        // An estimate. nvidia-smi has 23,028 MiB (modal-labs/modal-client#2797). Of the L4's 23,034
        // MiB a program sees 22,491.
        card("A10", 21.95, (8, 6), 72, (31_240, 600)),
        // deviceQuery: 42,298,834,944 bytes, 108 multiprocessors
        // (bottlerocket-os/bottlerocket#3873). TianheWu/CoSeR#10 has 39.50.
        card("A100 40GB", 39.39, (8, 0), 108, (19_490, 1555)),
        // lianqi1008/Control-GIC#6; levihsu/OOTDiffusion#235 has 79.25. 81,049 MiB and 108
        // multiprocessors: ekondis/mixbench#47.
        card("A100 80GB", 79.14, (8, 0), 108, (19_490, 2039)),
        // deviceQuery: 23,583,784,960 bytes, 58 multiprocessors
        // (bottlerocket-os/bottlerocket-kernel-kit#139).
        card("L4", 21.96, (8, 9), 58, (30_290, 300)),
        // stepfun-ai/Step-Video-T2V#8.
        card("L40S", 44.42, (8, 9), 142, (91_610, 864)),
        // vllm-project/vllm#27508.
        card("H100 80GB", 79.11, (9, 0), 132, (66_910, 3350)),
        // Measured by the project on such a card.
        card("H200 141GB", 139.80, (9, 0), 132, (66_910, 4800)),
    ]
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_card_is_found_by_its_name_and_by_a_part_of_it() {
        for card in CARDS.iter() {
            assert_eq!(Card::named(card.name()).as_ref(), Some(card));
        }
        let name = |text: &str| Card::named(text).map(|card| card.name().to_owned());
        assert_eq!(name("4090").as_deref(), Some("RTX 4090"));
        assert_eq!(name("a100 80").as_deref(), Some("A100 80GB"));
        assert_eq!(name("l4").as_deref(), Some("L4"));
        assert_eq!(name("GTX 970"), None);
        assert_eq!(name(" "), None);
    }

    #[test]
    fn operations_are_those_of_the_cores_at_a_clock_that_cards_have() {
        for card in CARDS.iter() {
            let cores = match card.capability().major * 10 + card.capability().minor {
                75 | 80 => 64,
                _ => 128,
            };
            let throughput = card.throughput().expect("all cards of the table have it");
            let cores = f64::from(cores * card.multiprocessors());
            let clock = f64::from(throughput.gflops) / cores / 2.0;
            assert!((1.4..2.6).contains(&clock), "{}: {clock} GHz", card.name());
        }
    }

    #[test]
    fn cards_are_found_by_what_drivers_call_them() {
        let name = |driver: &str| Card::of_driver(driver).map(Card::name);
        assert_eq!(name("Tesla T4"), Some("T4"));
        assert_eq!(name("NVIDIA GeForce RTX 3060"), Some("RTX 3060 12GB"));
        assert_eq!(name("NVIDIA A100-PCIE-40GB"), Some("A100 40GB"));
        assert_eq!(name("NVIDIA A100 80GB PCIe"), Some("A100 80GB"));
        assert_eq!(name("NVIDIA L40S"), Some("L40S"));
        assert_eq!(name("NVIDIA H100 80GB HBM3"), Some("H100 80GB"));
        assert_eq!(name("NVIDIA H200"), Some("H200 141GB"));
        for other in ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A10G", "NVIDIA", ""] {
            assert_eq!(name(other), None, "{other}");
        }
    }

    #[test]
    fn memory_is_a_little_below_the_number_on_the_box() {
        let boxes = [16, 12, 8, 24, 12, 24, 32, 24, 40, 80, 24, 48, 80, 141];
        assert_eq!(boxes.len(), CARDS.len());
        for (card, gib) in CARDS.iter().zip(boxes) {
            let share = card.memory().ratio(Bytes::gib(gib));
            assert!((0.90..1.0).contains(&share), "{}: {share}", card.name());
        }
    }
}
