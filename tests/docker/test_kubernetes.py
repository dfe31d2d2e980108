"""The manifests for Kubernetes: pods and volumes by the Kubernetes schema, KubeRay's own fields by its API reference.

No checker knows KubeRay's kinds, so their fields are listed here as its reference (1.5) has them.
"""

import copy
import shlex
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml

from launch.console.cli import parse_command
from launch.console.configuration import resolve_settings
from tests.docker.conftest import manifests, pins

Manifest = dict[str, Any]

CLUSTER = {
    **{"rayVersion": str, "authOptions": dict, "headGroupSpec": dict, "workerGroupSpecs": list, "suspend": bool},
    **{"enableInTreeAutoscaling": bool, "autoscalerOptions": dict, "gcsFaultToleranceOptions": dict, "managedBy": str},
    **{"headServiceAnnotations": dict, "upgradeStrategy": dict},
}
JOB = {
    **{"entrypoint": str, "rayClusterSpec": dict, "backoffLimit": int, "shutdownAfterJobFinishes": bool},
    **{"ttlSecondsAfterFinished": int, "activeDeadlineSeconds": int, "submissionMode": str, "runtimeEnvYAML": str},
    **{"entrypointNumCpus": float, "entrypointNumGpus": float, "entrypointResources": str, "jobId": str},
    **{"submitterPodTemplate": dict, "submitterConfig": dict, "clusterSelector": dict, "metadata": dict},
    **{"suspend": bool, "managedBy": str, "deletionStrategy": dict},
}
HEAD = {
    **{"template": dict, "rayStartParams": dict, "serviceType": str, "headService": dict, "enableIngress": bool},
    **{"resources": dict, "labels": dict},
}
WORKERS = {
    **{"groupName": str, "template": dict, "rayStartParams": dict, "replicas": int, "minReplicas": int},
    **{"maxReplicas": int, "numOfHosts": int, "idleTimeoutSeconds": int, "scaleStrategy": dict, "suspend": bool},
    **{"resources": dict, "labels": dict},
}


def check_fields(kind: str, spec: Manifest, fields: dict[str, type]) -> None:
    for name, value in spec.items():
        assert name in fields, f"{kind} has no field {name}"
        assert isinstance(value, fields[name]), f"{kind}.{name} is {value!r}"


def check_ray(manifest: Manifest) -> None:
    """Checks a RayCluster or a RayJob down to its pod templates."""
    assert manifest["apiVersion"] == "ray.io/v1" and set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    spec = manifest["spec"]
    if manifest["kind"] == "RayJob":
        check_fields("RayJobSpec", spec, JOB)
        spec = spec["rayClusterSpec"]
    check_fields("RayClusterSpec", spec, CLUSTER)
    assert spec["authOptions"] == {"mode": "token"}
    check_fields("HeadGroupSpec", spec["headGroupSpec"], HEAD)
    for group in spec["workerGroupSpecs"]:
        check_fields("WorkerGroupSpec", group, WORKERS)
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        for name, value in group["rayStartParams"].items():
            assert isinstance(value, str), f"rayStartParams.{name} must be text"
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes_validate.validate(pod, "1.34", strict=True)


def pods(manifest: Manifest) -> Iterator[Manifest]:
    spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        yield group["template"]["spec"]


@pytest.fixture(params=["raycluster.yaml", "rayjob.yaml"])
def manifest(request: pytest.FixtureRequest) -> Manifest:
    (only,) = manifests(request.param)
    return only


def test_the_manifest_has_only_fields_that_exist(manifest: Manifest) -> None:
    check_ray(manifest)


@pytest.mark.parametrize("damage", ["spec", "pod", "text", "auth"])
def test_a_wrong_manifest_would_be_found(manifest: Manifest, damage: str) -> None:
    wrong = copy.deepcopy(manifest)
    cluster = wrong["spec"].get("rayClusterSpec", wrong["spec"])
    if damage == "spec":
        cluster["workerGroupSpecs"][0]["replica"] = 2
    elif damage == "pod":
        cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    elif damage == "text":
        cluster["headGroupSpec"]["rayStartParams"]["metrics-export-port"] = 8080
    else:
        del cluster["authOptions"]
    with pytest.raises((AssertionError, KeyError, kubernetes_validate.ValidationError)):
        check_ray(wrong)


def test_the_volume_is_valid_shared_and_the_one_that_every_pod_mounts(manifest: Manifest) -> None:
    (claim,) = manifests("storage.yaml")
    kubernetes_validate.validate(claim, "1.34", strict=True)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods(manifest):
        (volume,) = pod["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (container,) = pod["containers"]
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/runs"}]


def test_pods_are_no_root_hold_no_secret_and_ask_for_what_they_may_use(manifest: Manifest) -> None:
    for pod in pods(manifest):
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert "env" not in container and "secretRef" in container["envFrom"][0]
        assert (
            container["image"]
            == f"cory-rllib:{'gpu' if 'nvidia.com/gpu' in container['resources']['limits'] else 'cpu'}"
        )


def test_there_are_workers_with_gpus_and_workers_without(manifest: Manifest) -> None:
    assert [pod["containers"][0]["image"] for pod in pods(manifest)] == [
        f"cory-rllib:{kind}" for kind in ("cpu", "cpu", "gpu")
    ]
    spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    assert spec["rayVersion"] == pins("cpu.txt")["ray"]


def test_the_job_runs_a_command_that_exists_and_goes_on_in_the_same_folder() -> None:
    (job,) = manifests("rayjob.yaml")
    cory, train, *words = shlex.split(job["spec"]["entrypoint"])
    assert (cory, train) == ("cory", "train")
    requested = parse_command("train", words)
    assert requested.continue_ and requested.out.startswith("/runs/")
    preset, *pairs = requested.words
    assert resolve_settings(preset, [], pairs).num_runners == 2


def test_the_job_has_time_to_save_its_update_when_it_is_stopped() -> None:
    (job,) = manifests("rayjob.yaml")
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"]) == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "3600"}}
