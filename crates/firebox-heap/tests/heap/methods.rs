//! Which methods of burn's backend traits have rules in the Flex model.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use expect_test::expect;
use firebox_heap::Heap;

/// The folder of this package in the checkout that runs. Another checkout that shares its build
/// outputs may have built this test.
fn folder() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo names it").into()
}

/// The sources of burn-backend, as cargo resolved it for this workspace.
fn backend_sources() -> PathBuf {
    let rustc = Command::new("rustc").arg("-vV").output().expect("rustc runs");
    let version = String::from_utf8(rustc.stdout).expect("rustc writes text");
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).expect("a host");
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--filter-platform", host])
        .current_dir(folder())
        .output()
        .expect("cargo runs");
    assert!(metadata.status.success(), "{}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: serde_json::Value =
        serde_json::from_slice(&metadata.stdout).expect("cargo writes JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let backend = packages.iter().find(|package| package["name"] == "burn-backend");
    let manifest = backend.expect("burn-backend")["manifest_path"].as_str().expect("a path");
    Path::new(manifest).parent().expect("a folder").join("src/backend/ops")
}

/// The methods of the traits in a source file.
fn trait_methods(source: &Path) -> BTreeSet<String> {
    let text = std::fs::read_to_string(source).expect("the sources of burn-backend are on disk");
    let mut methods = BTreeSet::new();
    let mut in_trait = false;
    for line in text.lines() {
        if line.starts_with("pub trait ") {
            in_trait = true;
        } else if line == "}" {
            in_trait = false;
        }
        let declared = line.strip_prefix("    fn ").or_else(|| line.strip_prefix("    async fn "));
        if let Some(declared) = declared.filter(|_| in_trait) {
            let name = declared.split(['(', '<']).next().expect("a name");
            methods.insert(name.to_owned());
        }
    }
    assert!(!methods.is_empty(), "no trait in {}", source.display());
    methods
}

#[test]
fn methods_without_a_rule_are_listed() {
    let sources = backend_sources();
    let heap = Heap::flex();
    let mut missing = String::new();
    for file in [
        "tensor.rs",
        "int_tensor.rs",
        "bool_tensor.rs",
        "activation.rs",
        "modules/base.rs",
        "qtensor.rs",
    ] {
        let methods = trait_methods(&sources.join(file));
        let without: Vec<_> = methods.iter().filter(|name| !heap.has_rule(name)).collect();
        missing += &format!("{file}:\n");
        for name in without {
            missing += &format!("    {name}\n");
        }
    }
    expect![[r#"
        tensor.rs:
            float_argtopk
            float_device
            float_into_data
            float_is_require_grad
        int_tensor.rs:
            int_argtopk
            int_device
            int_into_data
        bool_tensor.rs:
            bool_device
            bool_into_data
        activation.rs:
        modules/base.rs:
            ctc_loss
            ctc_loss_backward
            has_ctc_loss_backward
        qtensor.rs:
            dequantize
            q_abs
            q_add
            q_add_scalar
            q_all
            q_all_dim
            q_any
            q_any_dim
            q_argmax
            q_argmin
            q_argsort
            q_argtopk
            q_cat
            q_clamp
            q_clamp_max
            q_clamp_min
            q_cos
            q_cosh
            q_cummax
            q_cummin
            q_cumprod
            q_cumsum
            q_detach
            q_device
            q_div
            q_div_scalar
            q_erf
            q_exp
            q_expand
            q_flip
            q_from_data
            q_gather
            q_into_data
            q_is_require_grad
            q_log
            q_log1p
            q_matmul
            q_max
            q_max_abs
            q_max_abs_dim
            q_max_dim
            q_max_dim_with_indices
            q_mean
            q_mean_dim
            q_min
            q_min_dim
            q_min_dim_with_indices
            q_mul
            q_mul_scalar
            q_neg
            q_permute
            q_powf
            q_powf_scalar
            q_powi
            q_powi_scalar
            q_prod
            q_prod_dim
            q_recip
            q_repeat_dim
            q_reshape
            q_select
            q_set_require_grad
            q_sin
            q_sinh
            q_slice
            q_sort
            q_sort_with_indices
            q_sqrt
            q_sub
            q_sub_scalar
            q_sum
            q_sum_dim
            q_swap_dims
            q_tan
            q_tanh
            q_to_device
            q_topk
            q_transpose
            quantize
            quantize_dynamic
    "#]]
    .assert_eq(&missing);
}
