//! Which methods of burn's backend traits the Flex model has rules for.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use expect_test::expect;
use firebox_trace::Heap;

/// The sources of burn-backend, as cargo resolved it for this workspace.
fn backend_sources() -> PathBuf {
    let rustc = Command::new("rustc").arg("-vV").output().expect("rustc runs");
    let version = String::from_utf8(rustc.stdout).expect("rustc writes text");
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).expect("a host");
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--filter-platform", host])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
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
    expect![[""]].assert_eq(&missing);
}
